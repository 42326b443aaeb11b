// Batches of a table as tensors: their forms, new ones, and those that a caller passes to be filled.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "exchange.hpp"
#include "fields.hpp"
#include "gather.hpp"
#include "gil.hpp"

namespace ostinato {

/// New tensors for all fields, and their memory.
struct NewBatch {
    std::vector<nb::object> tensors;
    std::vector<Byte*> addresses;
};

/// Describe an int64 tensor `[n]`, contiguous, on the CPU. Raises std::invalid_argument for another one.
inline const std::int64_t* slots_of(nb::handle tensor, std::int64_t& n) {
    dlpack::Tensor view{};
    const Exchange& torch = Exchange::torch();
    if (!torch.is_tensor(tensor) || !torch.view(tensor, view) || view.ndim != 1 ||
        !(view.dtype == dlpack::DataType{dlpack::kInt, 64, 1}) ||
        (view.shape[0] > 1 && view.strides[0] != 1)) {
        throw std::invalid_argument("slots must be a contiguous int64 tensor [n] on the CPU");
    }
    n = view.shape[0];
    return reinterpret_cast<const std::int64_t*>(Exchange::data_of(view));
}

/// Allocate tensors for `counts` rows: one number for all fields, or one for each.
inline NewBatch make_batch(const std::vector<Form>& forms, const std::vector<std::int64_t>& counts) {
    NewBatch batch;
    batch.tensors.reserve(forms.size());
    batch.addresses.reserve(forms.size());
    for (std::size_t f = 0; f < forms.size(); ++f) {
        NewTensor made = Exchange::torch().make(forms[f], counts[counts.size() == 1 ? 0 : f]);
        batch.tensors.push_back(std::move(made.object));
        batch.addresses.push_back(made.data);
    }
    return batch;
}

/// The fields of a table with the forms of their rows.
class Batches {
public:
    /// `columns` are tensors `[rows, *shape]` in the order of the fields. Raises std::invalid_argument if one
    /// is not memory that the exchange describes.
    Batches(nb::object fields, const nb::list& columns) : owner_(std::move(fields)) {
        fields_ = nb::cast<const Fields*>(owner_);
        forms_ = forms_of(columns);
        if (forms_.size() != fields_->count()) throw std::invalid_argument("one column for each field");
    }

    const Fields& fields() const { return *fields_; }

    const std::vector<Form>& forms() const { return forms_; }

    /// Allocate tensors; see `make_batch`.
    NewBatch make(const std::vector<std::int64_t>& counts) const { return make_batch(forms_, counts); }

    /// Copy rows to memory.
    void copy(const std::vector<const std::int64_t*>& slots, const std::vector<std::int64_t>& counts,
              const std::vector<Byte*>& outs) const {
        const Plan plan = fields_->plan_gather(slots, counts, outs);
        run_released_if(plan.bytes() >= kReleaseBytes, [&] {
            check_slots(plan);
            gather_rows(plan);
        });
    }

    /// The addresses of tensors that `rows` rows can be copied to. Raises nb::value_error naming the position
    /// of the first one that does not fit, and why.
    std::vector<Byte*> addresses(const std::vector<nb::object>& outs, std::int64_t rows) const {
        if (outs.size() != forms_.size()) throw nb::value_error("one tensor for each field");
        std::vector<Byte*> found;
        found.reserve(outs.size());
        const std::shared_ptr<const AddressRanges> stored = fields_->memory();
        for (std::size_t f = 0; f < forms_.size(); ++f) {
            dlpack::Tensor view{};
            if (!Exchange::torch().is_tensor(outs[f]) || !Exchange::torch().view(outs[f], view))
                refuse(f, "is not a tensor in CPU memory");
            if (!forms_[f].fits(view, 1) || view.shape[0] != rows) refuse(f, "has another dtype or shape");
            const bool empty = forms_[f].items() == 0;
            if (!empty && !Exchange::is_contiguous(view)) refuse(f, "is not contiguous");
            Byte* const data = Exchange::data_of(view);
            if (stored->overlaps(range_of(f, data, rows))) refuse(f, "shares memory with the storage");
            for (std::size_t other = 0; other < f; ++other) {
                const AddressRange mine = range_of(f, data, rows);
                const AddressRange theirs = range_of(other, found[other], rows);
                if (mine.begin < theirs.end && theirs.begin < mine.end)
                    refuse(f, "shares memory with another field of the batch");
            }
            found.push_back(data);
        }
        return found;
    }

private:
    AddressRange range_of(std::size_t field, const Byte* data, std::int64_t rows) const {
        return ostinato::range_of(data, static_cast<std::uint64_t>(rows), forms_[field].row_bytes());
    }

    [[noreturn]] static void refuse(std::size_t field, const char* why) {
        throw nb::value_error((std::to_string(field) + ":" + why).c_str());
    }

    nb::object owner_;
    const Fields* fields_ = nullptr;
    std::vector<Form> forms_;
};

}  // namespace ostinato
