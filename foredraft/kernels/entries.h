// Where keys and values lie: the one place that knows how the cache is laid out.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "simd.h"
#include "team.h"

namespace foredraft {

// Attention reads entries [kRunEntries i, kRunEntries (i + 1)) as one piece of memory. Blocks hold a
// multiple of so many.
constexpr int64_t kRunEntries = 32;

// An entry is D numbers: floats, bfloat16, or integers of 8 bits, which stand for themselves times a
// float that lies in front of them.
template <class Number>
constexpr bool kIsScaled = std::is_same_v<std::remove_const_t<Number>, int8_t>;

template <class Number>
constexpr int64_t kInFront = kIsScaled<Number> ? sizeof(float) : 0;

// The float in front of an entry's numbers.
inline float scale_of(const int8_t* entry) {
  float scale;
  std::memcpy(&scale, entry - sizeof scale, sizeof scale);
  return scale;
}

// Writes an entry; what it becomes depends on nothing else.
template <class Number>
inline void put_entry(const float* x, int64_t D, Number* entry) {
  for (int64_t i = 0; i < D; ++i) from_float(x[i], entry[i]);
}

// The largest number becomes 127. NaN and infinity make all of them NaN.
inline void put_entry(const float* x, int64_t D, int8_t* entry) {
  constexpr float kLeast = 1e-30f;  // what is below has no inverse
  float most = 0;
  bool is_finite = true;
  for (int64_t i = 0; i < D; ++i) {
    const float size = std::fabs(x[i]);
    is_finite &= size <= 3.4e38f;
    most = size > most ? size : most;
  }
  const float scale = !is_finite ? NAN : most < kLeast ? 0 : most / 127;
  const float inverse = scale > 0 ? 127 / most : 0;
  std::memcpy(entry - sizeof scale, &scale, sizeof scale);
  for (int64_t i = 0; i < D; ++i) {
    const float shifted = x[i] * inverse + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    uint8_t low;
    std::memcpy(&low, &shifted, sizeof low);  // of a number stored with its lowest byte first
    entry[i] = int8_t(low);
  }
}

// The keys, or the values, of one slot and key-value head in one layer: a table says in which block
// of memory each run of entries lies.
template <class Number>
struct Entries {
  Number* data;  // of that head and layer in block 0
  const int32_t* table;
  int64_t block_stride, stride;  // numbers from a block, or an entry, to the next
  int shift;  // a block holds 1 << shift entries

  Number* at(int64_t entry) const {
    const int64_t offset = entry & ((int64_t{1} << shift) - 1);
    return data + table[entry >> shift] * block_stride + offset * stride;
  }
};

// The scales of some entries, behind one another.
inline void put_scales(const Entries<const int8_t>& entries, Range range, float* scales) {
  for (int64_t entry = range.begin; entry < range.end;) {
    const int64_t end = std::min(range.end, entry / kRunEntries * kRunEntries + kRunEntries);
    const int8_t* at = entries.at(entry);
    for (; entry < end; ++entry, at += entries.stride) *scales++ = scale_of(at);
  }
}

// Entries that lie behind one another.
template <class Number>
struct Panel {
  Number* data;
  int64_t stride;

  Number* at(int64_t entry) const { return data + entry * stride; }
};

// The keys, or the values, of a whole layer.
template <class Number>
struct CacheLayer {
  Number* data;
  int64_t block_stride, head_stride, D;
  int shift;

  Entries<Number> entries(const int32_t* table, int64_t kv_head) const {
    constexpr int64_t kScale = kInFront<Number>;
    return {data + kv_head * head_stride + kScale, table, block_stride, D + kScale, shift};
  }
};

}  // namespace foredraft
