// Products of a weight matrix with a few to a few hundred activation rows.
//
// Shape legend: T tokens (activation rows), K inputs of a product, R weight rows of a block.
//
// The promise everything else rests on: an output element is the sum over K in one fixed order,
// kLanes running sums filled from left to right and added up by the tree of `sum_lanes`, whatever
// the number of tokens, the block that computes it or the thread. So a token has the same values,
// bit for bit, alone and among others.
//
// Speed comes from reading each weight once from memory. Weight rows are taken in panels small
// enough to stay in the nearest caches while all tokens pass over them, and the next panel is
// prefetched meanwhile. Within a panel a block of rows meets a block of tokens in registers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "simd.h"
#include "team.h"

namespace foredraft {

constexpr int64_t kPanelRows = 12;  // row blocks of every height divide it
constexpr int64_t kLargePanelRows = 4 * kPanelRows;
constexpr int64_t kManyTokens = 48;  // from here on larger panels: activations outweigh weights
constexpr int kBlockTokens = 6;

// Rows that meet a block of so many tokens. Their running sums, the weights and one activation
// must fit the 16 registers of AVX2: one spilled sum halves the speed.
constexpr int block_rows(int num_tokens) {
  constexpr int rows[] = {0, 6, 4, 3, 3, 2, 2};
  return rows[num_tokens];
}

// A matrix [rows, K], rows one after another.
template <class Weight>
struct Matrix {
  const Weight* data;
  int64_t K;

  const Weight* row(int64_t index) const { return data + index * K; }
  const void* at(int64_t index) const { return row(index); }
};

// Activation rows in lane order, each padded with zeros to whole pairs.
struct Activations {
  const float* data;
  int64_t stride;

  const float* row(int64_t token) const { return data + token * stride; }
};

// sums[r * T + t] = <row r of weights, row t of x>. The same number of rows at `ahead` is pulled
// towards the core meanwhile.
template <int R, int T, class Weight>
inline void dot_block(const Weight* weights, int64_t K, const float* x, int64_t x_stride,
                      const Weight* ahead, float* sums) {
  constexpr int64_t kLine = 64 / sizeof(Weight);  // of a cache
  constexpr int64_t kStride = std::max<int64_t>(kLine, kPair);
  Vec sum[R][T];
  UNROLL for (int r = 0; r < R; ++r)
    UNROLL for (int t = 0; t < T; ++t) sum[r][t] = Vec{};
  const auto step = [&](const Weight* w, int64_t w_stride, int64_t k) INLINE {
    Vec weight[R];
    UNROLL for (int r = 0; r < R; ++r) weight[r] = load_first(w + r * w_stride);
    UNROLL for (int t = 0; t < T; ++t) {
      const Vec first = load_to_register(x + t * x_stride + k);
      UNROLL for (int r = 0; r < R; ++r) accumulate(sum[r][t], weight[r], first);
    }
    UNROLL for (int r = 0; r < R; ++r) weight[r] = load_second(w + r * w_stride);
    UNROLL for (int t = 0; t < T; ++t) {
      const Vec second = load_to_register(x + t * x_stride + k + kLanes);
      UNROLL for (int r = 0; r < R; ++r) accumulate(sum[r][t], weight[r], second);
    }
  };
  int64_t k = 0;
  for (; k + kStride <= K; k += kStride) {
    for (int64_t i = 0; i < kStride; i += kLine)
      UNROLL for (int r = 0; r < R; ++r) __builtin_prefetch(ahead + r * K + k + i, 0, kToL2);
    for (int64_t i = 0; i < kStride; i += kPair) step(weights + k + i, K, k + i);
  }
  for (; k + kPair <= K; k += kPair) step(weights + k, K, k);
  if (k < K) {
    Weight rest[R][kPair] = {};
    for (int r = 0; r < R; ++r) std::copy(weights + r * K + k, weights + (r + 1) * K, rest[r]);
    step(rest[0], kPair, k);
  }
  const auto at = [&](int i) { return i < R * T ? sum[i / T][i % T] : Vec{}; };
  UNROLL for (int i = 0; i < R * T; i += 4) {
    const Quad quad = sum_lanes(at(i), at(i + 1), at(i + 2), at(i + 3));
    std::memcpy(sums + i, &quad, sizeof quad);
  }
}

// Weight rows [begin, end) against T tokens; calls put(token, row, value).
template <int R, int T, class Weight, class Put>
inline void row_blocks(const Matrix<Weight>& weights, int64_t begin, int64_t end, const float* x,
                       int64_t x_stride, int64_t token, int64_t ahead, const Put& put) {
  float sums[(R * T + 3) / 4 * 4];
  int64_t row = begin;
  for (; row + R <= end; row += R) {
    const Weight* const here = weights.row(row);
    dot_block<R, T>(here, weights.K, x, x_stride, here + ahead, sums);
    for (int r = 0; r < R; ++r)
      for (int t = 0; t < T; ++t) put(token + t, row + r, sums[r * T + t]);
  }
  if constexpr (R > 1)
    row_blocks<1, T>(weights, row, end, x, x_stride, token, ahead, put);
}

template <class Weight, class Put>
inline void panel(const Matrix<Weight>& weights, Range rows, Activations x, int64_t token,
                  int64_t num_tokens, int64_t ahead, const Put& put) {
  const auto blocks = [&](auto tokens) {
    constexpr int T = decltype(tokens)::value;
    row_blocks<block_rows(T), T>(weights, rows.begin, rows.end, x.row(token), x.stride, token,
                                 ahead, put);
  };
  switch (num_tokens) {
    case 1: return blocks(std::integral_constant<int, 1>{});
    case 2: return blocks(std::integral_constant<int, 2>{});
    case 3: return blocks(std::integral_constant<int, 3>{});
    case 4: return blocks(std::integral_constant<int, 4>{});
    case 5: return blocks(std::integral_constant<int, 5>{});
    default: return blocks(std::integral_constant<int, 6>{});
  }
}

// Weight rows `rows` against all tokens, in blocks of tokens as even as they come. As many at `ahead`
// are prefetched meanwhile.
template <class Weight, class Put>
inline void all_tokens(const Matrix<Weight>& weights, Range rows, Activations x,
                       int64_t num_tokens, const void* ahead, const Put& put) {
  const int64_t distance = static_cast<const Weight*>(ahead) - weights.row(rows.begin);
  // Fours are a little faster than sixes, where they come out even.
  const bool in_fours = num_tokens % 4 == 0 || num_tokens >= kManyTokens;
  const int64_t most = in_fours ? 4 : kBlockTokens;
  const int64_t blocks = (num_tokens + most - 1) / most;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t token = num_tokens * b / blocks, stop = num_tokens * (b + 1) / blocks;
    panel(weights, rows, x, token, stop - token, distance, put);
  }
}

// Short rows make higher panels: a prefetch must be well ahead.
template <class Weight>
inline int64_t panel_rows(const Matrix<Weight>& weights, int64_t num_tokens) {
  const int64_t rows = num_tokens < kManyTokens ? kPanelRows : kLargePanelRows;
  return rows * std::max<int64_t>(1, 512 / weights.K);
}

}  // namespace foredraft
