// Keys by dimensions: entries become lanes.
//
// Shape legend: D head size.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "simd.h"

namespace foredraft {

// Calls put(vector, word, first) with each 32-bit word of the keys of entries [first, first +
// kLanes), for `entries` that lie behind one another, a multiple of kLanes,
// `stride` numbers apart. A word is one dimension of float keys, two of bfloat16 ones, four of int8
// ones; zeros fill up the last. If there are only `count` entries, zeros stand for the others.
template <class Number, class Put>
inline void transpose_keys(const Number* keys, int64_t stride, int64_t D, int64_t entries,
                           int64_t count, const Put& put) {
  constexpr int64_t kStep = kLanes * sizeof(float) / sizeof(Number);  // dimensions of a vector
  for (int64_t first = 0; first < entries; first += kLanes)
    for (int64_t d = 0; d < D; d += kStep) {
      const int64_t there = std::min(kStep, D - d);
      const Number* source = keys + first * stride + d;
      Ints columns[kLanes];
      if (first + kLanes <= count && there == kStep) {
        load_columns(source, stride * int64_t(sizeof(Number)), columns);
      } else {
        Ints rows[kLanes] = {};
        for (int64_t i = 0; i < std::min<int64_t>(kLanes, count - first); ++i)
          std::memcpy(&rows[i], source + i * stride, size_t(there) * sizeof(Number));
        load_columns(rows, sizeof rows[0], columns);
      }
      const int64_t word = d * kLanes / kStep;
      for (int64_t w = 0; w < ceil_div(there * kLanes, kStep); ++w) put(columns[w], word + w, first);
    }
}

}  // namespace foredraft
