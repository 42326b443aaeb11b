// Direct calls of buffers that track episodes: writes that record them, and draws of slices, n-step
// transitions and stacks of frames.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

#include "batches.hpp"
#include "episodes.hpp"
#include "exchange.hpp"
#include "gil.hpp"
#include "ring.hpp"
#include "slices.hpp"
#include "windows.hpp"

namespace ostinato {

/// The episode table of a tracker as it is now: null if it is not native, or not read from the storage yet.
class EpisodesNow {
public:
    explicit EpisodesNow(const nb::object& tracker) {
        static PyObject* const name = PyUnicode_InternFromString("native_table");
        PyObject* const found = PyObject_GetAttr(tracker.ptr(), name);
        if (found == nullptr) throw nb::python_error();
        owner_ = nb::steal(found);
        if (nb::isinstance<Episodes>(owner_)) table_ = nb::cast<Episodes*>(owner_);
    }

    /// Whether rows are read from the storage before the next draw, and need not be recorded.
    bool is_unread() const { return owner_.is_none(); }

    Episodes* get() const { return table_; }

private:
    nb::object owner_;
    Episodes* table_ = nullptr;
};

/// The episode tracker of a buffer whose rows tell by flags, and numbers of their episodes, where these end.
class TrackedEpisodes {
public:
    /// `ends` are the positions of the fields of flags, bool with one value per row; `ids` and `mask` those
    /// of a number of the episode, int64, and of a mask, or -1.
    TrackedEpisodes(nb::object tracker, std::vector<std::int64_t> ends, std::int64_t ids, std::int64_t mask)
        : tracker_(std::move(tracker)), ends_(std::move(ends)), ids_(ids), mask_(mask) {}

    EpisodesNow now() const { return EpisodesNow(tracker_); }

    /// Whether a run goes on where the last one ended.
    static bool continues(const Episodes& table, const RingRun& run, std::int64_t capacity) {
        const std::int64_t first = (run.start + capacity - run.skip % capacity) % capacity;
        return table.capacity() == capacity && (table.present() == 0 || first == table.cursor());
    }

    /// Record rows from the memory of all their fields.
    void record(Episodes& table, const Placed& to, const std::vector<const Byte*>& addresses) const {
        std::vector<Flag> ends, mask;
        std::vector<std::int64_t> ids;
        const Flag* flags = ends_.empty() ? nullptr : column(ends_.front(), to, addresses, ends);
        for (std::size_t i = 1; i < ends_.size(); ++i) {
            std::vector<Flag> room;
            const Flag* const more = column(ends_[i], to, addresses, room);
            if (ends.empty()) ends.assign(flags, flags + to.run.total());
            for (std::size_t row = 0; row < ends.size(); ++row) ends[row] |= more[row];
            flags = ends.data();
        }
        table.record_write(to.run.start, to.run.rows, to.run.skip,
                           {flags, column(ids_, to, addresses, ids), column(mask_, to, addresses, mask)});
    }

private:
    /// A field of all rows in the order of writing: in place, or copied to `room`. Null for the position -1.
    template <typename Value>
    static const Value* column(std::int64_t field, const Placed& to,
                               const std::vector<const Byte*>& addresses, std::vector<Value>& room) {
        if (field < 0) return nullptr;
        const auto* const values =
            reinterpret_cast<const Value*>(addresses.at(static_cast<std::size_t>(field)));
        if (to.picks.empty()) return values;
        for (const std::int64_t pick : to.picks) room.push_back(values[pick]);
        return room.data();
    }

    nb::object tracker_;
    std::vector<std::int64_t> ends_;
    std::int64_t ids_, mask_;
};

/// The windows of one draw. Nothing in it changes while its rows are copied.
struct DrawnWindows {
    std::vector<std::int64_t> anchors;  // slots drawn
    std::int64_t width = 1;
    std::vector<std::int64_t> rows;  // [anchors, width]
    std::vector<std::int64_t>
        others;                       // last rows [anchors], or rows of the following stacks [anchors, width]
    std::vector<Flag> picks;          // of `others`
    std::vector<Byte> weights;        // of `rows`
    std::vector<std::int64_t> steps;  // [anchors], as the next one
    std::vector<float> discounts;
};

/// How draws become windows, and windows a batch.
class DirectWindows {
public:
    enum class Kind : std::uint8_t { slices, steps, stacks };

    /// Where the slots of a source of the reader are.
    enum class Role : std::uint8_t { anchors, rows, others };

    static constexpr std::int64_t kTop = std::numeric_limits<std::int64_t>::max();

    /// Slices: `number` of them, or of `length` rows each; the other is 0.
    DirectWindows(std::int64_t number, std::int64_t length)
        : kind_(Kind::slices), number_(number), length_(length) {
        if (number < 0 || length < 0 || (number == 0) == (length == 0))
            throw std::invalid_argument("slices have a number or a length");
    }

    /// Windows of a unit. `templates` are tensors `[1, *shape]` in the form of each field of a batch,
    /// `powers` returns the powers of n-step returns; None for stacks of `k` frames.
    DirectWindows(nb::object reader, const nb::list& templates, const nb::list& roles, nb::object keys,
                  nb::object powers, std::int64_t k)
        : kind_(powers.is_none() ? Kind::stacks : Kind::steps),
          length_(k),
          owner_(std::move(reader)),
          reader_(nb::cast<const WindowReader*>(owner_)),
          keys_(std::move(keys)),
          powers_(std::move(powers)) {
        forms_ = forms_of(templates);
        for (nb::handle role : roles) {
            const auto number = nb::cast<std::int64_t>(role);
            if (number < 0 || number > 2) throw std::invalid_argument("a role is 0, 1 or 2");
            roles_.push_back(static_cast<Role>(number));
        }
        if (forms_.size() != reader_->count() || roles_.size() != reader_->sources())
            throw std::invalid_argument("one template for each field, and one role for each source");
        if (kind_ == Kind::stacks && k < 2) throw std::invalid_argument("stacks have at least 2 frames");
        fields_ = forms_.size();
        if (kind_ != Kind::steps) return;
        forms_.push_back({{dlpack::kInt, 64, 1}, {}});
        forms_.push_back({{dlpack::kFloat, 32, 1}, {}});
    }

    /// Whether windows are slices, else those of a unit.
    bool are_slices() const { return kind_ == Kind::slices; }

    /// Keys of a batch; null for those of the rows.
    nb::handle keys() const { return keys_; }

    /// Draw and find windows for `n` records. `numbers(high, count)` returns random numbers as a tensor.
    /// False if Python has to; no number has been drawn then.
    template <typename Numbers>
    bool draw(const Episodes& table, std::int64_t rows, std::int64_t n, Numbers numbers,
              DrawnWindows& out) const {
        const bool all = table.rows() == rows;  // else some are masked
        if (table.present() != rows || (!all && kind_ == Kind::slices)) return false;
        std::int64_t count = 0;
        if (kind_ != Kind::slices) {
            const std::int64_t starts = all ? 0 : table.find_need(1);
            if (!all && (starts < 0 || table.start_rows(starts) == 0)) return false;
            const nb::object drawn = numbers(all ? rows : kTop, n);
            const std::int64_t* const slots = slots_of(drawn, count);
            out.anchors.assign(slots, slots + count);
            if (!all) table.draw(starts, slots, count, out.anchors.data());
            find(table, out);
            return true;
        }
        const std::int64_t part = number_ > 0 ? number_ : length_;
        if (n % part != 0) return false;
        const std::int64_t slices = number_ > 0 ? number_ : n / length_;
        out.width = n / slices;
        const std::int64_t handle = table.find_need(out.width);
        if (handle < 0 || table.start_rows(handle) == 0) return false;
        const nb::object drawn = numbers(kTop, 2 * slices);
        out.anchors.resize(static_cast<std::size_t>(slices));
        table.draw_episodes(handle, slots_of(drawn, count), slices, out.anchors.data());
        find(table, out);
        return true;
    }

    /// Find the windows of the rows drawn once more, as the table is now. False if one does not fit any more.
    bool find_again(const Episodes& table, DrawnWindows& out) const {
        std::vector<std::int64_t> ahead(out.anchors.size());
        table.ahead(out.anchors.data(), static_cast<std::int64_t>(ahead.size()), ahead.data());
        const std::int64_t least = kind_ == Kind::slices ? out.width - 1 : 0;
        const auto fits = [=](std::int64_t rows) { return rows >= least; };
        if (!std::all_of(ahead.begin(), ahead.end(), fits)) return false;
        find(table, out);
        return true;
    }

    /// Allocate the tensors of a batch.
    NewBatch make(const Batches& batches, const DrawnWindows& drawn) const {
        if (kind_ == Kind::slices) return batches.make({static_cast<std::int64_t>(drawn.rows.size())});
        NewBatch batch;
        for (const Form& form : forms_) {
            NewTensor made = Exchange::torch().make(form, static_cast<std::int64_t>(drawn.anchors.size()));
            batch.tensors.push_back(std::move(made.object));
            batch.addresses.push_back(made.data);
        }
        return batch;
    }

    /// Copy the rows of windows to the tensors of a batch, and sum up rewards.
    void fill(const Batches& batches, const DrawnWindows& drawn, const NewBatch& batch) const {
        if (kind_ == Kind::slices) {
            const auto rows = static_cast<std::int64_t>(drawn.rows.size());
            const Plan plan = batches.fields().plan_gather({drawn.rows.data()}, {rows}, batch.addresses);
            run_released_if(plan.bytes() >= kReleaseBytes, [&] {
                check_slots(plan);
                gather_slices(plan, drawn.width);
            });
            return;
        }
        const auto n = static_cast<std::int64_t>(drawn.anchors.size());
        std::vector<WindowReader::Source> sources;
        for (const Role role : roles_) sources.push_back(source_of(drawn, role));
        std::vector<Byte*> outs = batch.addresses;
        outs.resize(fields_);
        std::size_t bytes = 0;
        for (std::size_t f = 0; f < fields_; ++f) bytes += forms_[f].row_bytes() * drawn.anchors.size();
        run_released_if(bytes >= kReleaseBytes, [&] {
            reader_->check(sources, n, outs);
            reader_->read(sources, n, outs);
        });
        if (kind_ != Kind::steps) return;
        std::memcpy(batch.addresses[fields_], drawn.steps.data(), drawn.steps.size() * sizeof(std::int64_t));
        std::memcpy(batch.addresses[fields_ + 1], drawn.discounts.data(),
                    drawn.discounts.size() * sizeof(float));
    }

private:
    void find(const Episodes& table, DrawnWindows& out) const {
        const auto n = static_cast<std::int64_t>(out.anchors.size());
        switch (kind_) {
            case Kind::slices:
                out.rows.resize(static_cast<std::size_t>(n * out.width));
                return table.slices(out.anchors.data(), n, out.width, out.rows.data());
            case Kind::steps: return find_steps(table, n, out);
            case Kind::stacks: return find_stacks(table, n, out);
        }
    }

    WindowReader::Source source_of(const DrawnWindows& drawn, Role role) const {
        if (role == Role::anchors) return {drawn.anchors.data(), nullptr, nullptr, 1};
        if (role == Role::rows) {
            const Byte* const weights = drawn.weights.empty() ? nullptr : drawn.weights.data();
            return {drawn.rows.data(), nullptr, weights, drawn.width};
        }
        if (kind_ == Kind::steps) return {drawn.others.data(), nullptr, nullptr, 1};
        return {drawn.others.data(), drawn.picks.data(), nullptr, drawn.width};
    }

    void find_steps(const Episodes& table, std::int64_t n, DrawnWindows& out) const {
        PyObject* const result = PyObject_CallNoArgs(powers_.ptr());
        if (result == nullptr) throw nb::python_error();
        const nb::object powers = nb::steal(result);
        dlpack::Tensor view{};
        const bool plain = Exchange::torch().view(powers, view) && view.ndim == 1 && view.shape[0] > 1 &&
                           Exchange::is_contiguous(view) && view.dtype.code == dlpack::kFloat;
        if (!plain || (view.dtype.bits != 32 && view.dtype.bits != 64))
            throw std::invalid_argument("powers must be contiguous float32 or float64 [n + 1] on the CPU");
        out.width = view.shape[0] - 1;
        out.rows.resize(static_cast<std::size_t>(n * out.width));
        out.others.resize(static_cast<std::size_t>(n));
        out.steps.resize(static_cast<std::size_t>(n));
        out.discounts.resize(static_cast<std::size_t>(n));
        out.weights.resize(out.rows.size() * (view.dtype.bits / 8));
        const auto fill = [&]<typename Weight>(Weight) {
            const StepWindows<Weight> to{out.rows.data(), reinterpret_cast<Weight*>(out.weights.data()),
                                         out.steps.data(), out.discounts.data(), out.others.data()};
            table.steps(out.anchors.data(), n, out.width,
                        reinterpret_cast<const Weight*>(Exchange::data_of(view)), to);
        };
        view.dtype.bits == 32 ? fill(0.0F) : fill(0.0);
    }

    void find_stacks(const Episodes& table, std::int64_t n, DrawnWindows& out) const {
        out.width = length_;
        const auto frames = static_cast<std::size_t>(n * length_);
        out.rows.resize(frames);
        table.stack(out.anchors.data(), n, length_, false, out.rows.data(), nullptr);
        if (std::find(roles_.begin(), roles_.end(), Role::others) == roles_.end()) return;
        out.others.resize(frames);
        table.stack(out.anchors.data(), n, length_, true, out.others.data(), nullptr);
        out.picks.assign(frames, Flag{0});
        for (std::size_t i = static_cast<std::size_t>(length_) - 1; i < frames;
             i += static_cast<std::size_t>(length_)) {
            out.picks[i] = 1;
        }
    }

    Kind kind_;
    std::int64_t number_ = 0, length_ = 0;
    nb::object owner_;
    const WindowReader* reader_ = nullptr;
    nb::object keys_ = nb::none();
    nb::object powers_ = nb::none();
    std::vector<Form> forms_;  // of the fields, then of the number of steps and the discount
    std::vector<Role> roles_;
    std::size_t fields_ = 0;
};

}  // namespace ostinato
