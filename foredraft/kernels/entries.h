// Where keys and values lie: the one place that knows how the cache is laid out.
#pragma once

#include <cstdint>

namespace foredraft {

// Attention reads entries [kRunEntries i, kRunEntries (i + 1)) as one piece of memory, D numbers
// an entry. Blocks of a paged cache must hold a multiple of so many; then a block table may take the
// place of the multiplication in `at`.
constexpr int64_t kRunEntries = 32;

// The keys, or the values, of one slot and key-value head in one layer.
template <class Weight>
struct Entries {
  Weight* first;
  int64_t D;

  Weight* at(int64_t entry) const { return first + entry * D; }
};

// The keys, or the values, of a whole layer.
template <class Weight>
struct CacheLayer {
  Weight* data;
  int64_t slot_stride, head_stride, D;

  Entries<Weight> entries(int64_t slot, int64_t kv_head) const {
    return {data + slot * slot_stride + kv_head * head_stride, D};
  }
};

}  // namespace foredraft
