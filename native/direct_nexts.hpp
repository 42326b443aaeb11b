// Direct writes and draws of rows whose next observations are stored once.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

#include "exchange.hpp"
#include "gil.hpp"
#include "ring.hpp"
#include "single_copy.hpp"

namespace ostinato {

/// The fields of rows of which some are next observations, which are not in the table. Used under the lock.
class DirectNexts {
public:
    /// `pairs` are positions: of each next observation, and of the observation that it equals one row later;
    /// `kept` those of the fields in the table. `templates` are tensors `[1, *shape]` in the form of each
    /// field.
    DirectNexts(nb::object owner, const nb::list& pairs, const nb::list& kept, const nb::list& templates)
        : owner_(std::move(owner)), table_(nb::cast<SingleCopy*>(owner_)), forms_(forms_of(templates)) {
        for (nb::handle pair : pairs) {
            numbers_.push_back(static_cast<std::int64_t>(numbers_.size()));
            nexts_at_.push_back(position(pair[0]));
            obs_at_.push_back(position(pair[1]));
        }
        for (nb::handle field : kept) kept_.push_back(position(field));
    }

    const std::vector<Form>& forms() const { return forms_; }

    /// The addresses of the fields in the table, of those of all fields.
    template <typename Address>
    std::vector<Address> kept(const std::vector<Address>& addresses) const {
        return chosen(kept_, addresses);
    }

    /// Copy the next observations of rows, to those of the addresses of all fields. Without the lock.
    void read(const std::int64_t* slots, std::int64_t n, const std::vector<Byte*>& outs) const {
        const std::vector<Byte*> nexts = chosen(nexts_at_, outs);
        run_released_if(table_->row_bytes() * static_cast<std::size_t>(n) >= kReleaseBytes,
                        [&] { table_->gather(numbers_, slots, nullptr, n, nexts); });
    }

    /// Before rows are written from the cursor on: compare them, and give rows whose next observation is
    /// about to be overwritten a row of its own. False if Python has to, for want of memory, or for large
    /// rows.
    bool prepare(const RingRun& run, const RingCounts& ring, const std::vector<const Byte*>& addresses) {
        const auto rows = static_cast<std::size_t>(run.total());
        if (table_->row_bytes() * rows >= kReleaseBytes) return false;
        nexts_ = chosen(nexts_at_, addresses);
        flags_.resize(2 * rows);
        const std::int64_t need = table_->compare(ring.cursor, run.total(), chosen(obs_at_, addresses),
                                                  nexts_, flags_.data(), flags_.data() + rows);
        const std::int64_t most = table_->allocated();  // one for each slot is enough
        const bool fits = need >= 0 && (need <= most - table_->used() || most >= ring.capacity);
        return fits && table_->detach_run(run.start, run.rows, need) == 0;
    }

    /// After the rows of `prepare` were written: store their next observations.
    void link(const RingRun& run) {
        const Flag* const side = run.skip > 0 ? nullptr : flags_.data() + run.rows;
        table_->link_run(run.start, run.rows, run.skip, nexts_, flags_.data(), side);
    }

private:
    std::size_t position(nb::handle number) const {
        const auto found = nb::cast<std::size_t>(number);
        if (found >= forms_.size()) throw std::invalid_argument("a position of a field");
        return found;
    }

    template <typename Address>
    static std::vector<Address> chosen(const std::vector<std::size_t>& positions,
                                       const std::vector<Address>& addresses) {
        std::vector<Address> found;
        found.reserve(positions.size());
        for (const std::size_t at : positions) found.push_back(addresses[at]);
        return found;
    }

    nb::object owner_;
    SingleCopy* table_;
    std::vector<Form> forms_;
    std::vector<std::size_t> nexts_at_, obs_at_, kept_;
    std::vector<std::int64_t> numbers_;  // of all next observations in `table_`
    std::vector<const Byte*> nexts_;
    std::vector<Flag> flags_;
};

}  // namespace ostinato
