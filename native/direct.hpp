// Writes, draws and updates of priorities of the usual buffer, each in one call under the lock of the buffer:
// rows in packed memory of the CPU, a ring, nothing that has to be told of single rows.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <utility>
#include <vector>

#include "batches.hpp"
#include "direct_nexts.hpp"
#include "direct_windows.hpp"
#include "exchange.hpp"
#include "given_rows.hpp"
#include "prioritized.hpp"
#include "ring.hpp"
#include "sum_tree.hpp"

namespace ostinato {

/// The lock of a buffer, a `threading.RLock`, held as long as the object lives.
class Held {
public:
    Held(const nb::object& acquire, const nb::object& release) : release_(release) {
        PyObject* const taken = PyObject_CallNoArgs(acquire.ptr());
        if (taken == nullptr) throw nb::python_error();
        Py_DECREF(taken);
    }
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;
    ~Held() {
        nb::error_scope keep;  // an error on its way stays
        PyObject* const released = PyObject_CallNoArgs(release_.ptr());
        if (released == nullptr) {
            PyErr_WriteUnraisable(release_.ptr());
        } else {
            Py_DECREF(released);
        }
    }

private:
    const nb::object& release_;
};

/// What Python passes once; see buffers/direct.py.
struct DirectParts {
    nb::object acquire, release;  // of the lock
    nb::object batches, ring, stored, counts;
    nb::object seen;   // counts of the buffer, where `counts` are those of a view
    nb::object keys;   // tuple of the keys, None for rows that are a single tensor
    nb::object torch;  // the module: `torch.randint` and `torch.rand` are looked up in each call
    nb::object generator;
    nb::object func_transform, is_tracing;
    nb::object priorities;  // None for uniform draws, else an object with the methods that are called by name
    nb::object admits;      // None, or what is asked whether so many rows may be written now
    nb::object wrote;       // None, or what is called with the slots of rows just written
    std::int64_t first_generation = 0;  // added to the generations that users see
    std::int64_t width = 0;             // rows of a step of several environments, 0 for single rows
    bool env_first = false;             // whether batches of these are [environments, time]
    nb::object arrays;  // tuple of the numbers of all slots that a write changes: generations, then arrivals;
                        // empty in ring order
    nb::object turns;   // slots that new rows take in turn; None for those of the ring
    bool writes = false;
    bool draws = false;
    nb::object episodes;  // tuple of the TrackedEpisodes that follow the rows; windows are drawn by the first
    nb::object windows;   // DirectWindows, or None for single rows
    nb::object nexts;     // DirectNexts, or None if all fields are in the table
};

class Direct {
public:
    explicit Direct(DirectParts parts)
        : parts_(std::move(parts)),
          batches_(nb::cast<Batches*>(parts_.batches)),
          ring_(nb::cast<RingCounts*>(parts_.ring)),
          stored_(nb::cast<StoredRows*>(parts_.stored)),
          counts_(nb::cast<BufferCounts*>(parts_.counts)),
          seen_(nb::cast<BufferCounts*>(parts_.seen)),
          windows_(nb::cast<const DirectWindows*>(parts_.windows)),
          nexts_(nb::cast<DirectNexts*>(parts_.nexts)),
          given_(forms().size()),
          addresses_(forms().size()) {
        const nb::object numpy = nb::module_::import_("numpy");
        array_type_ = numpy.attr("ndarray");
        number_type_ = numpy.attr("generic");
        double_type_ = parts_.torch.attr("float64");
        device_ = parts_.torch.attr("device")("cpu");
        index_form_.dtype = {dlpack::kInt, 64, 1};
        if (parts_.width > 0) index_form_.shape = {2};
        std::int64_t slots = 0;
        for (nb::handle array : parts_.arrays) {
            arrays_.push_back(const_cast<std::int64_t*>(slots_of(array, slots)));
            if (slots != ring_->capacity) throw std::invalid_argument("a number for each slot");
        }
        for (nb::handle episodes : parts_.episodes)
            tracked_.push_back(nb::cast<const TrackedEpisodes*>(episodes));
        if (!parts_.turns.is_none()) turns_ = slots_of(parts_.turns, turns_count_);
        if (parts_.priorities.is_none()) return;
        ready_ = parts_.priorities.attr("ready");
        changed_ = parts_.priorities.attr("changed");
    }

    Direct(const Direct&) = delete;
    Direct& operator=(const Direct&) = delete;

    bool is_open() const { return open_; }

    /// Every call returns None from now on: the parts of the buffer have changed.
    void close() { open_ = false; }

    /// Write one row and return its slot, or one step of several environments and return its positions,
    /// int64 `[width, 2]`; None if Python has to.
    nb::object add(nb::handle rows) {
        Placed to;
        if (parts_.width > 0) return write(rows, {parts_.width}, to) ? positions(to) : nb::none();
        if (!write(rows, {}, to)) return nb::none();
        return nb::int_(to.slot(0, ring_->capacity));
    }

    /// Write rows and return their slots, int64 `[n]`, of environments int64 `[n, 2]`; None if Python has to.
    nb::object extend(nb::handle rows) {
        Placed to;
        GivenField::Lead lead{-1};
        if (parts_.width > 0) lead.insert(parts_.env_first ? lead.begin() : lead.end(), parts_.width);
        return write(rows, std::move(lead), to) ? positions(to) : nb::none();
    }

    /// Whether a batch has more info than `sample` returns.
    bool has_more_info() const { return windows_ != nullptr; }

    /// Whether fields of rows have paths as keys: the rows are nested.
    bool by_path() const {
        return PyTuple_Check(parts_.keys.ptr()) && PyTuple_Size(parts_.keys.ptr()) > 0 &&
               PyTuple_Check(PyTuple_GetItem(parts_.keys.ptr(), 0));
    }

    /// Dimensions of the batch of `extend`; `add` has one less.
    int lead() const { return parts_.width > 0 ? 2 : 1; }

    /// Draw `n` rows and return a tuple of the batch, their slots, and with priorities their weights and
    /// generations; for slices their slots and length, for other windows the batch alone. None if Python has
    /// to.
    nb::object sample(std::int64_t n) {
        if (!parts_.draws || n < 1 || !is_eager()) return nb::none();
        if (windows_ != nullptr) return sample_windows(n);
        Drawn drawn;
        if (!draw(n, drawn)) return nb::none();
        NewBatch batch = make_batch(forms(), {n});
        if (!copy(drawn, n, batch.addresses)) return nb::none();
        return result(as_batch(batch.tensors, parts_.keys), drawn, n);
    }

    /// As `sample`, into the tensors of an earlier batch, which takes the place of the new one.
    nb::object sample_into(nb::handle out, std::int64_t n) {
        if (!parts_.draws || windows_ != nullptr || nexts_ != nullptr || n < 1 || !is_eager())
            return nb::none();
        std::vector<nb::object> outs;  // other threads may change the dict meanwhile
        if (!find_fields(out, outs)) return nb::none();
        const std::vector<Byte*> addresses = batches_->addresses(outs, n);
        Drawn drawn;
        if (!draw(n, drawn) || !copy(drawn, n, addresses)) return nb::none();
        return result(nb::borrow(out), drawn, n);
    }

    /// Set the priorities of rows, but of those that have been replaced since their generations were drawn.
    /// Returns how many were; None if Python has to.
    nb::object update_priority(nb::handle index, nb::handle priority, nb::handle generation) {
        if (parts_.priorities.is_none() || !is_eager()) return nb::none();
        dlpack::Tensor slots{}, given{}, expected{};
        if (!is_column(index, slots) || !(slots.dtype == index_form_.dtype)) return nb::none();
        if (!is_column(priority, given) || given.dtype.code != dlpack::kFloat || given.dtype.bits < 32)
            return nb::none();
        const bool bare = generation.is_none();
        if (!bare && (!is_column(generation, expected) || !(expected.dtype == index_form_.dtype)))
            return nb::none();
        const std::int64_t n = slots.shape[0];
        if (given.shape[0] != n || (!bare && expected.shape[0] != n)) return nb::none();
        const Held held(parts_.acquire, parts_.release);
        const nb::object state = is_usable() ? result_of(ready_) : nb::none();
        if (state.is_none()) return nb::none();
        UpdateResult done;
        std::vector<std::int64_t> wanted;
        for (std::int64_t i = 0; !bare && i < n; ++i)
            wanted.push_back(items<std::int64_t>(expected)[i] - parts_.first_generation);
        if (!update(state, slots, given, bare ? nullptr : wanted.data(), done)) return nb::none();
        changed_(done.largest_given, done.largest_before, done.largest_after);
        return nb::int_(done.stale);
    }

private:
    /// The fields of rows given.
    const std::vector<Form>& forms() const { return nexts_ == nullptr ? batches_->forms() : nexts_->forms(); }

    /// Whether the parts are those that the object was made for, and no other buffer wrote. Under the lock.
    bool is_usable() const {
        return open_ && stored_->plain && ring_->in_order == arrays_.empty() &&
               stored_->writes == seen_->writes_seen;
    }

    /// Whether no transform of torch.func and no trace is active.
    bool is_eager() const {
        return result_of(parts_.func_transform).is_none() && result_of(parts_.is_tracing).is(Py_False);
    }

    static nb::object result_of(const nb::object& function) {
        PyObject* const result = PyObject_CallNoArgs(function.ptr());
        if (result == nullptr) throw nb::python_error();
        return nb::steal(result);
    }

    /// Read, place, record and copy rows `[*lead, ...]`. False, with nothing changed, if Python has to.
    bool write(nb::handle rows, GivenField::Lead lead, Placed& to) {
        std::vector<nb::object> values;  // dropped after the lock is released
        if (!parts_.writes || !is_eager() || !find_plain(rows, values)) return false;
        const Held held(parts_.acquire, parts_.release);
        if (!is_usable() || reading_) return false;
        const Reading reading(*this);
        return read(values, lead) && store(lead, to);
    }

    /// Lets the rows given go at the end of a write. A write within it, of a finalizer, goes the general way.
    class Reading {
    public:
        explicit Reading(Direct& direct) : direct_(direct) { direct_.reading_ = true; }
        Reading(const Reading&) = delete;
        Reading& operator=(const Reading&) = delete;
        ~Reading() {
            for (GivenField& field : direct_.given_) field.release();
            direct_.reading_ = false;
        }

    private:
        Direct& direct_;
    };

    bool read(const std::vector<nb::object>& values, GivenField::Lead& lead) {
        for (std::size_t f = 0; f < values.size(); ++f) {
            const Form& form = forms()[f];
            if (!given_[f].read(values[f], form, lead, array_type_, number_type_)) return false;
            addresses_[f] = given_[f].address();
        }
        return true;
    }

    /// Find the values of the rows given. False if Python has to read them.
    ///
    /// Before the lock: asking torch for a negative bit lets other threads run. If it held the lock, they
    /// would wake up only to wait for it.
    bool find_plain(nb::handle rows, std::vector<nb::object>& values) const {
        if (!find_fields(rows, values)) return false;
        const Exchange& torch = Exchange::torch();
        for (std::size_t f = 0; f < values.size(); ++f) {
            const bool is_float = forms()[f].dtype.code == dlpack::kFloat;
            if (is_float && torch.is_tensor(values[f]) && !torch.has_plain_sign(values[f])) return false;
        }
        return true;
    }

    /// Find the values of a dict in the order of the fields, or take the tensor that is the only one. False
    /// if there are others.
    bool find_fields(nb::handle data, std::vector<nb::object>& found) const {
        found.clear();
        if (parts_.keys.is_none()) {
            found.push_back(nb::borrow(data));
            return true;
        }
        const std::size_t count = forms().size();
        if (!PyDict_CheckExact(data.ptr()) || PyDict_Size(data.ptr()) != static_cast<Py_ssize_t>(count))
            return false;
        for (std::size_t f = 0; f < count; ++f) {
            PyObject* const key = PyTuple_GetItem(parts_.keys.ptr(), static_cast<Py_ssize_t>(f));
            PyObject* const value = PyDict_GetItemWithError(data.ptr(), key);
            if (value == nullptr && PyErr_Occurred() != nullptr) throw nb::python_error();
            if (value == nullptr) return false;
            found.push_back(nb::borrow(value));
        }
        return true;
    }

    /// Write the rows that were read. False, with nothing changed, if Python has to.
    bool store(const GivenField::Lead& lead, Placed& to) {
        const std::int64_t n =
            std::accumulate(lead.begin(), lead.end(), std::int64_t{1}, std::multiplies<>());
        if (n < 1 || ring_->reserves(n, arrays_.empty())) return false;
        if (!parts_.admits.is_none() && !parts_.admits(n).is(Py_True)) return false;
        place(lead, n, to);
        const Fields& fields = batches_->fields();
        std::vector<const Byte*> kept;
        if (nexts_ != nullptr) kept = nexts_->kept(addresses_);
        Plan plan = fields.plan_write(to.slots.empty() ? nullptr : to.slots.data(), to.run.rows,
                                      nexts_ == nullptr ? addresses_ : kept);
        plan.start = to.run.start;
        plan.skip = to.run.skip;
        plan.picks = to.picks.empty() ? nullptr : to.picks.data() + to.run.skip;
        if (batches_overlap(*fields.memory(), plan, static_cast<std::uint64_t>(n))) return false;
        const bool linked = nexts_ != nullptr;
        if (linked && (!to.picks.empty() || !nexts_->prepare(to.run, *ring_, addresses_))) return false;
        if (!track(to)) return false;
        record(n, to);  // first: a reader that meets half of the rows sees other generations
        const bool is_run = to.slots.empty() && to.picks.empty();
        run_released_if(plan.bytes() >= kReleaseBytes,
                        [&] { is_run ? write_rows(plan) : scatter_rows(plan); });
        if (linked) nexts_->link(to.run);
        report(to);
        return true;
    }

    /// Choose the slots of `n` rows.
    void place(const GivenField::Lead& lead, std::int64_t n, Placed& to) const {
        if (turns_ == nullptr) {
            to.run = ring_->next(n);
            const bool across = parts_.env_first && lead.size() == 2 && lead[0] > 1 && lead[1] > 1;
            if (across) to.pick_across(lead[0], lead[1]);
            return;
        }
        if (n == 1) {  // any slot is a run
            to.run = {turns_[ring_->turn % turns_count_], 1, 0};
            return;
        }
        to.run.skip = std::max<std::int64_t>(n - turns_count_, 0);
        to.run.rows = n - to.run.skip;
        std::int64_t at = (ring_->turn + to.run.skip) % turns_count_;
        for (std::int64_t i = 0; i < to.run.rows; ++i) {
            to.slots.push_back(turns_[at]);
            at = at + 1 == turns_count_ ? 0 : at + 1;
        }
    }

    /// Record the episodes of rows. False, with nothing changed, if they do not follow the last ones.
    bool track(const Placed& to) const {
        std::vector<EpisodesNow> tables;
        for (const TrackedEpisodes* episodes : tracked_) {
            tables.push_back(episodes->now());
            if (tables.back().is_unread()) continue;
            const Episodes* const now = tables.back().get();
            if (now == nullptr || !TrackedEpisodes::continues(*now, to.run, ring_->capacity)) return false;
        }
        for (std::size_t i = 0; i < tracked_.size(); ++i) {
            if (!tables[i].is_unread()) tracked_[i]->record(*tables[i].get(), to, addresses_);
        }
        return true;
    }

    /// Record that `n` rows are written: their generations, and all counts.
    void record(std::int64_t n, const Placed& to) {
        const std::int64_t first = ring_->written + 1 + (to.slots.empty() ? to.run.skip : 0);
        for (std::int64_t* const numbers : arrays_) {
            for (std::int64_t i = 0; i < to.run.rows; ++i) numbers[to.slot(i, ring_->capacity)] = first + i;
        }
        if (turns_ != nullptr) ring_->turn = (ring_->turn + n) % turns_count_;
        ring_->record(n, to.end());
        stored_->record(to.end(), ring_->capacity);
        seen_->writes_seen = stored_->writes;
        counts_->written += n;
        counts_->since_empty += n;
    }

    /// Tell the observers that have to know which rows were written.
    void report(const Placed& to) const {
        if (parts_.wrote.is_none()) return;
        const nb::object kept = to.slots.empty() ? nb::none() : positions(to);
        parts_.wrote(to.run.start, to.run.rows, to.run.skip, kept);
    }

    /// Return the slot of each row, int64 `[n]`, -1 for those that no slot keeps; of environments int64
    /// `[n, 2]`: step and environment.
    nb::object positions(const Placed& to) const {
        const std::int64_t n = to.run.total(), width = parts_.width;
        NewTensor made = Exchange::torch().make(index_form_, n);
        auto* out = reinterpret_cast<std::int64_t*>(made.data);
        if (!to.slots.empty()) {
            std::fill_n(out, to.run.skip, -1);
            std::copy(to.slots.begin(), to.slots.end(), out + to.run.skip);
            return made.object;
        }
        std::int64_t slot = (to.run.start - to.run.skip) % ring_->capacity;
        if (slot < 0) slot += ring_->capacity;
        for (std::int64_t i = 0; i < n; ++i) {
            *out++ = width > 0 ? slot / width : slot;
            if (width > 0) *out++ = slot % width;
            slot = slot + 1 == ring_->capacity ? 0 : slot + 1;
        }
        return made.object;
    }

    /// The generations of all slots.
    Generations generations() const {
        if (arrays_.empty()) return ring_->generations();
        return {arrays_.front(), ring_->capacity, 0, 0, 0, 0};
    }

    /// What a draw gives, and the last row written before it.
    struct Drawn {
        nb::object slots;
        const std::int64_t* at = nullptr;
        nb::object weights;
        nb::object generations;
        std::int64_t* generations_at = nullptr;
        std::int64_t serial = 0;
    };

    /// Draw rows. False if Python has to.
    bool draw(std::int64_t n, Drawn& drawn) {
        // torch.rand and torch.randint let other threads run: if this one held the lock, they would wake up
        // only to wait for it
        if (!parts_.priorities.is_none()) {
            if (!is_usable() || ring_->rows == 0 || result_of(ready_).is_none()) return false;
            const nb::object uniforms = fractions(n);
            dlpack::Tensor numbers{};
            if (!is_column(uniforms, numbers)) return false;
            const Held held(parts_.acquire, parts_.release);
            if (!is_usable() || ring_->rows == 0) return false;
            drawn.serial = ring_->written;
            return draw_by_priority(numbers, n, drawn);
        }
        const std::int64_t rows = std::atomic_ref(ring_->rows).load(std::memory_order_relaxed);
        if (!is_usable() || rows == 0) return false;
        drawn.slots = integers(rows, n);
        std::int64_t count = 0;
        drawn.at = slots_of(drawn.slots, count);
        const Held held(parts_.acquire, parts_.release);
        if (!is_usable() || ring_->rows < rows) return false;
        drawn.serial = ring_->written;
        return true;
    }

    /// Random integers in [0, high), int64 `[n]`.
    nb::object integers(std::int64_t high, std::int64_t n) {
        static PyObject* const names = Py_BuildValue("(ss)", "generator", "device");
        const nb::int_ zero(0);
        const nb::int_ end(high);
        const nb::object size = nb::make_tuple(n);
        const std::array<PyObject*, 6> arguments{
            nullptr, zero.ptr(), end.ptr(), size.ptr(), parts_.generator.ptr(), device_.ptr()};
        return call(parts_.torch.attr("randint"), arguments.data() + 1, 3, names);
    }

    /// Random numbers in [0, 1), float64 `[n]`.
    nb::object fractions(std::int64_t n) {
        static PyObject* const names = Py_BuildValue("(sss)", "dtype", "generator", "device");
        const nb::object size = nb::make_tuple(n);
        const std::array<PyObject*, 5> arguments{nullptr, size.ptr(), double_type_.ptr(),
                                                 parts_.generator.ptr(), device_.ptr()};
        return call(parts_.torch.attr("rand"), arguments.data() + 1, 1, names);
    }

    /// Draw windows and return the batch; None if Python has to.
    nb::object sample_windows(std::int64_t n) {
        std::int64_t serial = 0;
        DrawnWindows drawn;
        {
            const Held held(parts_.acquire, parts_.release);
            if (!is_usable() || ring_->rows == 0) return nb::none();
            const EpisodesNow now = tracked_.front()->now();
            const auto numbers = [this](std::int64_t high, std::int64_t count) {
                return integers(high, count);
            };
            if (now.get() == nullptr || !windows_->draw(*now.get(), ring_->rows, n, numbers, drawn))
                return nb::none();
            serial = ring_->written;
        }
        NewBatch batch = windows_->make(*batches_, drawn);
        windows_->fill(*batches_, drawn, batch);
        if (!is_untouched(serial) && !refill(drawn, batch, serial)) return nb::none();
        count_drawn(n);
        const nb::handle keys = windows_->keys().is_none() ? nb::handle(parts_.keys) : windows_->keys();
        if (!windows_->are_slices()) return nb::make_tuple(as_batch(batch.tensors, keys));
        const auto rows = static_cast<std::int64_t>(drawn.rows.size());
        NewTensor slots = Exchange::torch().make({{dlpack::kInt, 64, 1}, {}}, rows);
        std::memcpy(slots.data, drawn.rows.data(), drawn.rows.size() * sizeof(std::int64_t));
        return nb::make_tuple(as_batch(batch.tensors, keys), slots.object, drawn.width);
    }

    /// Copy windows once more, under the lock, if one of their rows was replaced since `serial`. False if one
    /// does not fit its episode any more, or rows are gone.
    bool refill(DrawnWindows& drawn, const NewBatch& batch, std::int64_t serial) {
        const Held held(parts_.acquire, parts_.release);
        if (!is_usable()) return false;
        const auto replaced = [&](std::int64_t slot) { return is_replaced(slot, serial); };
        if (std::none_of(drawn.rows.begin(), drawn.rows.end(), replaced)) return true;
        const EpisodesNow now = tracked_.front()->now();
        if (now.get() == nullptr || *std::max_element(drawn.rows.begin(), drawn.rows.end()) >= ring_->rows ||
            !windows_->find_again(*now.get(), drawn))
            return false;
        windows_->fill(*batches_, drawn, batch);
        counts_->redone += 1;
        return true;
    }

    /// Whether nothing was written since `serial`, and the parts are the same. Without the lock.
    bool is_untouched(std::int64_t serial) const {
        return open_ && std::atomic_ref(ring_->written).load(std::memory_order_relaxed) == serial;
    }

    /// Count rows that reach the caller. Without the lock.
    void count_drawn(std::int64_t n) {
        std::atomic_ref(counts_->drawn).fetch_add(n, std::memory_order_relaxed);
    }

    /// Whether the row in a slot was replaced since `serial`.
    bool is_replaced(std::int64_t slot, std::int64_t serial) const {
        const std::int64_t generation = ring_->generation(slot);
        return generation > serial || generation <= ring_->base;
    }

    /// Draw rows by the sum tree of a sampler that has a priority for every row.
    bool draw_by_priority(const dlpack::Tensor& numbers, std::int64_t n, Drawn& drawn) {
        const nb::object state = result_of(ready_);
        if (state.is_none()) return false;
        const auto* const tree = nb::cast<const SumTree*>(state[0]);
        const bool single = nb::cast<bool>(state[2]);
        NewTensor slots = Exchange::torch().make(index_form_, n);
        NewTensor weights =
            Exchange::torch().make({{dlpack::kFloat, static_cast<std::uint8_t>(single ? 32 : 64), 1}, {}}, n);
        NewTensor generations = Exchange::torch().make(index_form_, n);
        auto* const at = reinterpret_cast<std::int64_t*>(slots.data);
        auto* const generations_at = reinterpret_cast<std::int64_t*>(generations.data);
        const auto draw_to = [&](auto* to) {
            ostinato::sample(*tree, items<double>(numbers), n, nb::cast<double>(state[1]),
                             ring_->generations(), at, to, generations_at);
        };
        single ? draw_to(reinterpret_cast<float*>(weights.data))
               : draw_to(reinterpret_cast<double*>(weights.data));
        for (std::int64_t i = 0; i < n; ++i) generations_at[i] += parts_.first_generation;
        drawn = {
            std::move(slots.object), at,          std::move(weights.object), std::move(generations.object),
            generations_at,          drawn.serial};
        return true;
    }

    bool update(const nb::object& state, const dlpack::Tensor& slots, const dlpack::Tensor& given,
                const std::int64_t* expected, UpdateResult& done) const {
        auto* const tree = nb::cast<SumTree*>(state[0]);
        const auto* const hidden = reinterpret_cast<const Flag*>(nb::cast<std::uintptr_t>(state[4]));
        auto* const values = reinterpret_cast<double*>(nb::cast<std::uintptr_t>(state[3]));
        const Priorities all{values, hidden, ring_->rows, nb::cast<double>(state[5]),
                             nb::cast<double>(state[6])};
        const auto run = [&](const auto* numbers) {
            PriorityUpdate change(*tree, all, items<std::int64_t>(slots), numbers, slots.shape[0]);
            done = change.run(expected, generations(), nb::cast<bool>(state[7]));
        };
        try {
            given.dtype.bits == 32 ? run(items<float>(given)) : run(items<double>(given));
        } catch (const std::logic_error&) {  // std::out_of_range and std::invalid_argument: Python names what
                                             // is wrong
            return false;
        }
        return true;
    }

    /// Describe a contiguous tensor `[n]` of at least one element.
    static bool is_column(nb::handle tensor, dlpack::Tensor& out) {
        const Exchange& torch = Exchange::torch();
        return torch.is_tensor(tensor) && torch.view(tensor, out) && out.ndim == 1 &&
               Exchange::is_contiguous(out);
    }

    template <typename T>
    static const T* items(const dlpack::Tensor& tensor) {
        return reinterpret_cast<const T*>(Exchange::data_of(tensor));
    }

    static nb::object call(const nb::object& function, PyObject* const* arguments, std::size_t count,
                           PyObject* names) {
        PyObject* const found =
            PyObject_Vectorcall(function.ptr(), arguments, count | PY_VECTORCALL_ARGUMENTS_OFFSET, names);
        if (found == nullptr) throw nb::python_error();
        return nb::steal(found);
    }

    /// Copy the rows drawn; once more under the lock if one was replaced meanwhile. False if rows are gone.
    bool copy(const Drawn& drawn, std::int64_t n, const std::vector<Byte*>& outs) {
        fill(drawn.at, n, outs);
        if (is_untouched(drawn.serial)) return true;
        const Held held(parts_.acquire, parts_.release);
        if (!is_usable()) return false;
        const auto replaced = [&](std::int64_t slot) { return is_replaced(slot, drawn.serial); };
        if (std::none_of(drawn.at, drawn.at + n, replaced)) return true;
        if (*std::max_element(drawn.at, drawn.at + n) >= ring_->rows) return false;
        fill(drawn.at, n, outs);
        for (std::int64_t i = 0; drawn.generations_at != nullptr && i < n; ++i)
            drawn.generations_at[i] = ring_->generation(drawn.at[i]) + parts_.first_generation;
        counts_->redone += 1;
        return true;
    }

    /// Copy rows to the tensors of a batch.
    void fill(const std::int64_t* slots, std::int64_t n, const std::vector<Byte*>& outs) const {
        if (nexts_ == nullptr) return batches_->copy({slots}, {n}, outs);
        batches_->copy({slots}, {n}, nexts_->kept(outs));
        nexts_->read(slots, n, outs);
    }

    nb::object result(const nb::object& batch, const Drawn& drawn, std::int64_t n) {
        count_drawn(n);
        if (!drawn.weights.is_valid()) return nb::make_tuple(batch, drawn.slots);
        return nb::make_tuple(batch, drawn.slots, drawn.weights, drawn.generations);
    }

    static nb::object as_batch(std::vector<nb::object>& tensors, nb::handle keys) {
        if (keys.is_none()) return std::move(tensors[0]);
        PyObject* const batch = PyDict_New();
        if (batch == nullptr) throw nb::python_error();
        nb::object owned = nb::steal(batch);
        for (std::size_t f = 0; f < tensors.size(); ++f) {
            PyObject* const key = PyTuple_GetItem(keys.ptr(), static_cast<Py_ssize_t>(f));
            if (PyDict_SetItem(batch, key, tensors[f].ptr()) != 0) throw nb::python_error();
        }
        return owned;
    }

    DirectParts parts_;
    Batches* batches_;
    RingCounts* ring_;
    StoredRows* stored_;
    BufferCounts* counts_;
    BufferCounts* seen_;
    std::vector<const TrackedEpisodes*> tracked_;
    const DirectWindows* windows_;        // null: batches of single rows
    DirectNexts* nexts_;                  // null: all fields are in the table
    std::deque<GivenField> given_;        // used under the lock
    std::vector<const Byte*> addresses_;  // as `given_`
    bool reading_ = false;                // as `given_`
    nb::object array_type_, number_type_, double_type_, device_;
    Form index_form_;                    // of an index of rows
    std::vector<std::int64_t*> arrays_;  // of `DirectParts`
    const std::int64_t* turns_ = nullptr;
    std::int64_t turns_count_ = 0;
    nb::object ready_, changed_;  // methods of `DirectParts::priorities`
    std::atomic<bool> open_ = true;
};

}  // namespace ostinato
