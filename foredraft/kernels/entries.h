// Where keys and values lie: the one place that knows how the cache is laid out.
#pragma once

#include <cstdint>

namespace foredraft {

// Attention reads entries [kRunEntries i, kRunEntries (i + 1)) as one piece of memory, D numbers
// an entry. Blocks hold a multiple of so many.
constexpr int64_t kRunEntries = 32;

// The keys, or the values, of one slot and key-value head in one layer: a table says in which block
// of memory each run of entries lies.
template <class Weight>
struct Entries {
  Weight* data;  // of that head and layer in block 0
  const int32_t* table;
  int64_t block_stride, D;
  int shift;  // a block holds 1 << shift entries

  Weight* at(int64_t entry) const {
    const int64_t offset = entry & ((int64_t{1} << shift) - 1);
    return data + table[entry >> shift] * block_stride + offset * D;
  }
};

// Entries that lie behind one another.
template <class Weight>
struct Panel {
  Weight* data;
  int64_t D;

  Weight* at(int64_t entry) const { return data + entry * D; }
};

// The keys, or the values, of a whole layer.
template <class Weight>
struct CacheLayer {
  Weight* data;
  int64_t block_stride, head_stride, D;
  int shift;

  Entries<Weight> entries(const int32_t* table, int64_t kv_head) const {
    return {data + kv_head * head_stride, table, block_stride, D, shift};
  }
};

}  // namespace foredraft
