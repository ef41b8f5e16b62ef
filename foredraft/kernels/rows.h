// What is done to single rows of floats: norms, rotary angles, padding.
//
// Shape legend: D head size.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "simd.h"

namespace foredraft {

// Zeros behind row `row` of rows that are padded to whole pairs.
inline void pad_with_zeros(float* rows, int64_t row, int64_t size) {
  const int64_t whole = padded(size), last = size - size % kPair;
  std::fill(rows + row * whole + last, rows + (row + 1) * whole, 0.0f);
}

// 1 / root mean square of a row.
inline float inverse_rms(const float* x, int64_t size, double eps) {
  Vec squares{};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
  float rest[kLanes] = {};
  std::copy(x + i, x + size, rest);
  squares = fma(load(rest), load(rest), squares);
  const float mean = sum_lanes(squares) / float(size);
  return 1.0f / std::sqrt(mean + float(eps));
}

inline void normalise_head(float* x, const float* weight, int64_t D, double eps) {
  if (!weight) return;
  const float scale = inverse_rms(x, D, eps);
  for (int64_t i = 0; i < D; ++i) x[i] = weight[i] * (x[i] * scale);
}

inline void rotate_head(float* x, const float* cosine, const float* sine, int64_t D) {
  for (int64_t i = 0; i < D / 2; ++i) {
    const float first = x[i], second = x[i + D / 2];
    x[i] = first * cosine[i] - second * sine[i];
    x[i + D / 2] = second * cosine[i] + first * sine[i];
  }
}

}  // namespace foredraft
