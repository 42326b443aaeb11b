// The bare limits: what the memory of this machine allows, without any of the work of a library.
// Compiled on the fly by benchmarks/peers/_limits.py; numbers in, nothing out.
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

struct Field {
    char* base;       // first byte of the field in row 0
    const char* src;  // `pool` contiguous batches of rows to write, `width` bytes each
    char* out;        // contiguous rows to read into, `width` bytes each
    int64_t stride;   // bytes from one row to the next
    int64_t width;    // bytes of the field in one row
};

// A table and the cursors of its calls: one argument, so that a call from Python costs as little as it can.
struct Table {
    const Field* fields;
    int64_t count;         // fields
    int64_t rows;          // of the table
    int64_t reads;         // rows per read
    int64_t writes;        // rows per write
    int64_t pool;          // batches to write in turn
    int64_t turn;          // next of them
    int64_t cursor;        // next slot of the ring
    void* tree;            // of priorities, or null
    const int64_t* index;  // rows to read in turn, or null
    int64_t indices;       // how many
    int64_t at;            // next of them
};

constexpr int64_t kAhead = 32;  // rows between a prefetch and its copy: cold rows cost about 100 ns each
constexpr int64_t kMaxRows = 1 << 16;
constexpr int64_t kLine = 64;

uint64_t state = 0x9E3779B97F4A7C15ull;
int64_t drawn[kMaxRows];

inline uint64_t next_random() {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

// The widths of the benchmarks' fields are known when compiling, so that memcpy becomes a few moves.
inline void copy(char* to, const char* from, int64_t width) {
    switch (width) {
        case 1: *to = *from; return;
        case 4: std::memcpy(to, from, 4); return;
        case 24: std::memcpy(to, from, 24); return;
        case 68: std::memcpy(to, from, 68); return;
        case 256: std::memcpy(to, from, 256); return;
        default: std::memcpy(to, from, static_cast<size_t>(width));
    }
}

// Always inline: GCC takes a function that only prefetches for one without effect, and drops calls of it.
[[gnu::always_inline]] inline void prefetch(const Field* fields, int count, int64_t row, bool packed) {
    if (packed) {  // the fields of a row are neighbours: ask for its cache lines once
        const char* from = fields[0].base + row * fields[0].stride;
        const Field& last = fields[count - 1];
        const char* end = last.base + row * last.stride + last.width;
        for (; from < end; from += kLine) __builtin_prefetch(from);
        return;
    }
    for (int f = 0; f < count; ++f) {
        const char* from = fields[f].base + row * fields[f].stride;
        const int64_t bytes =
            fields[f].width < 4 * kLine ? fields[f].width : 4 * kLine;  // then the hardware goes on
        for (int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(from + at);
        __builtin_prefetch(from + bytes - 1);
    }
}

inline bool is_packed(const Field* fields, int count) {
    return count > 1 && fields[1].base - fields[0].base < fields[0].stride;
}

// A bare sum tree: eight children to a node, side by side in one cache line; nothing but sums.
constexpr int64_t kFan = 8;

struct alignas(kLine) Line {
    double child[kFan];
};

struct Tree {
    std::vector<std::vector<Line>> levels;  // the root's children first
    int64_t leaves;
};

inline double sum_of(const Line& line) {
    double sum = 0;
    for (double child : line.child) sum += child;
    return sum;
}

inline double uniform() { return static_cast<double>(next_random() >> 11) * 0x1.0p-53; }

double rest[kMaxRows];

// All draws go down level by level, so that the lines that they ask for come at the same time.
void draw(const Tree& tree, int64_t n) {
    const double total = sum_of(tree.levels[0][0]);
    for (int64_t i = 0; i < n; ++i) {
        rest[i] = uniform() * total;
        drawn[i] = 0;
    }
    for (size_t level = 0; level < tree.levels.size(); ++level) {
        for (int64_t i = 0; i < n; ++i) {
            const double* child = tree.levels[level][drawn[i]].child;
            double before = 0, sum = 0;
            int64_t at = 0;
            for (int64_t c = 0; c + 1 < kFan; ++c) {  // without a branch, which would be predicted wrongly
                sum += child[c];
                const bool beyond = rest[i] >= sum;
                before = beyond ? sum : before;
                at += beyond;
            }
            rest[i] -= before;
            drawn[i] = drawn[i] * kFan + at;
            if (level + 1 < tree.levels.size()) __builtin_prefetch(&tree.levels[level + 1][drawn[i]]);
        }
    }
    for (int64_t i = 0; i < n; ++i) {
        if (drawn[i] >= tree.leaves) drawn[i] = tree.leaves - 1;
    }
}

void set(Tree& tree, int64_t n) {
    int64_t* at = drawn;
    for (int64_t i = 0; i < n; ++i) {
        tree.levels.back()[at[i] / kFan].child[at[i] % kFan] = uniform();
        at[i] /= kFan;
    }
    for (size_t level = tree.levels.size() - 1; level > 0; --level) {
        for (int64_t i = 0; i < n; ++i) {
            tree.levels[level - 1][at[i] / kFan].child[at[i] % kFan] = sum_of(tree.levels[level][at[i]]);
            at[i] /= kFan;
        }
    }
}

// Reads the rows index[0..n) of every field.
void gather(const Table& table, const int64_t* index, int64_t n) {
    const Field* fields = table.fields;
    const int count = static_cast<int>(table.count);
    const bool packed = is_packed(fields, count);
    for (int64_t i = 0; i < n && i < kAhead; ++i) prefetch(fields, count, index[i], packed);
    for (int64_t i = 0; i < n; ++i) {
        if (i + kAhead < n) prefetch(fields, count, index[i + kAhead], packed);
        for (int f = 0; f < count; ++f) {
            const Field& field = fields[f];
            copy(field.out + i * field.width, field.base + index[i] * field.stride, field.width);
        }
    }
}

}  // namespace

extern "C" {

// A sum tree of random leaves.
void* limit_tree(int64_t leaves) {
    auto* tree = new Tree;
    tree->leaves = leaves;
    for (int64_t nodes = leaves; nodes > 1 || tree->levels.empty();) {
        nodes = (nodes + kFan - 1) / kFan;
        tree->levels.insert(tree->levels.begin(), std::vector<Line>(static_cast<size_t>(nodes)));
    }
    for (int64_t i = 0; i < leaves; ++i) tree->levels.back()[i / kFan].child[i % kFan] = uniform();
    for (size_t level = tree->levels.size() - 1; level > 0; --level) {
        for (size_t i = 0; i < tree->levels[level].size(); ++i) {
            tree->levels[level - 1][i / kFan].child[i % kFan] = sum_of(tree->levels[level][i]);
        }
    }
    return tree;
}

void limit_tree_free(void* tree) { delete static_cast<Tree*>(tree); }

// Draws fresh uniform rows and reads them.
void limit_sample(Table* table) {
    for (int64_t i = 0; i < table->reads; ++i) {
        drawn[i] = static_cast<int64_t>(
            (static_cast<unsigned __int128>(next_random()) * static_cast<uint64_t>(table->rows)) >> 64);
    }
    gather(*table, drawn, table->reads);
}

// Draws rows by priority, reads them, and gives them new priorities.
void limit_prioritized(Table* table) {
    Tree& tree = *static_cast<Tree*>(table->tree);
    draw(tree, table->reads);
    gather(*table, drawn, table->reads);
    set(tree, table->reads);
}

// Reads the next rows of an index drawn in advance.
void limit_indexed(Table* table) {
    if (table->at + table->reads > table->indices) table->at = 0;
    gather(*table, table->index + table->at, table->reads);
    table->at += table->reads;
}

// Writes the next batch at the cursor of a ring and moves the cursor; rows must not wrap inside one call.
void limit_write(Table* table) {
    const int64_t n = table->writes;
    if (table->cursor + n > table->rows) table->cursor = 0;
    for (int64_t f = 0; f < table->count; ++f) {
        const Field& field = table->fields[f];
        char* to = field.base + table->cursor * field.stride;
        const char* from = field.src + table->turn * n * field.width;
        if (field.stride == field.width) {
            std::memcpy(to, from, static_cast<size_t>(n * field.width));
            continue;
        }
        for (int64_t i = 0; i < n; ++i) copy(to + i * field.stride, from + i * field.width, field.width);
    }
    table->cursor += n;
    if (++table->turn == table->pool) table->turn = 0;
}

// Both of them: a write, then a read of uniform rows or of an index drawn in advance.
void limit_write_sample(Table* table) {
    limit_write(table);
    limit_sample(table);
}

void limit_write_indexed(Table* table) {
    limit_write(table);
    limit_indexed(table);
}
}
