// Chunks of what tokens see: their weights, and how chunks are folded together.
//
// Shape legend: see attention.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "entries.h"
#include "simd.h"
#include "team.h"

namespace foredraft {

constexpr int64_t kChunk = 256;  // ranks; part of what the result is defined by
constexpr int64_t kScoreStride = kChunk + kRunEntries;  // scores are logarithms to base 2
constexpr float kLog2E = 1.44269504f;

// What one token sees.
struct Visible {
  int64_t prefix;
  const int32_t* extras;
  int64_t num_extras;
  int64_t first;  // rank that it sees; those before are outside of its window

  // Extras that follow the prefix at once, as those of a chain, belong to it. Of all the last `window`
  // are seen; all if 0.
  static Visible of(int64_t prefix, const int32_t* extras, int64_t num_extras, int64_t window = 0) {
    for (; num_extras && *extras == prefix; --num_extras) ++prefix, ++extras;
    const int64_t count = prefix + num_extras;
    return {prefix, extras, num_extras, window ? std::max<int64_t>(count - window, 0) : 0};
  }

  int64_t count() const { return prefix + num_extras; }

  // Whether its first rank is in the chunk that begins here.
  bool begins_in(int64_t begin) const { return first / kChunk * kChunk == begin; }

  // The extras with ranks in [begin, end), as numbers of extras.
  Range extras_within(int64_t begin, int64_t end) const {
    const auto number = [&](int64_t rank) {
      return std::min(std::max<int64_t>(rank - prefix, 0), num_extras);
    };
    return {number(begin), number(end)};
  }
};

// Numbers from one query's values to the next: whole vectors and whole tiles.
inline int64_t attended_width(int64_t D) { return (D + 31) / 32 * 32; }

// Rows of M queries' numbers: as many as blocks of equally many on tiles have.
inline int64_t attended_rows(int64_t M) {
  const int64_t blocks = (M + 15) / 16;
  return (M + blocks - 1) / blocks * blocks;
}

// What M queries attended so far: unnormalised values in lane order, and by what to normalise them.
struct Attended {
  float* values;  // [attended_rows(M), attended_width(D)]
  float* most;    // [M] largest score
  float* sum;     // [M] of 2^(score - most)

  static int64_t size(int64_t M, int64_t D) {
    return attended_rows(M) * (attended_width(D) + 32) / 32 * 32;  // whole lines
  }

  static Attended in(float* memory, int64_t M, int64_t D) {
    float* const behind = memory + attended_rows(M) * attended_width(D);
    return {memory, behind, behind + M};
  }
};

// The larger one, and NaN of NaN. (The instruction returns its second operand then.)
inline Vec at_least(Vec x, Vec low) {
#if defined(__AVX512F__)
  return (Vec)_mm512_max_ps((__m512)low, (__m512)x);
#elif defined(__AVX__)
  return (Vec)_mm256_max_ps((__m256)low, (__m256)x);
#else
  return x < low ? low : x;
#endif
}

// 2^x of x <= 0 to about 1 ulp. What is below 2^-100 counts as that; NaN stays NaN. x = n + r with
// |r| <= 1/2, and 2^r by a polynomial of S. Moshier's Cephes library (exp2f).
inline Vec exp2_of_negative(Vec x) {
  const Vec magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec bounded = at_least(x, broadcast(-100.0f));
  const Vec shifted = bounded + magic;
  const Vec r = bounded - (shifted - magic);
  Vec e = broadcast(1.535336188e-4f);
  for (float coefficient : {1.339887440e-3f, 9.618437357e-3f, 5.550332471e-2f, 0.2402264791f,
                            0.6931472029f, 1.0f})
    e = fma(e, r, broadcast(coefficient));
  const Ints power = ((Ints)shifted << 23) + 0x3f800000;  // 2^n
  return e * (Vec)power;
}

// Adds what query m attended in the next chunk.
inline void fold(const Attended& all, const Attended& next, int64_t m, int64_t D) {
  const Vec before = broadcast(all.most[m]), there = broadcast(next.most[m]);
  const Vec most = max(before, there);
  const Vec old = exp2_of_negative(before - most), fresh = exp2_of_negative(there - most);
  float* values = all.values + m * attended_width(D);
  const float* added = next.values + m * attended_width(D);
  for (int64_t d = 0; d < padded(D); d += kLanes)
    store(values + d, fma(load(added + d), fresh, load(values + d) * old));
  all.sum[m] = fma(broadcast(next.sum[m]), fresh, broadcast(all.sum[m]) * old)[0];
  all.most[m] = most[0];
}

// Takes over what query m attended in its first chunk.
inline void begin_with(const Attended& all, const Attended& next, int64_t m, int64_t D) {
  const int64_t stride = attended_width(D);
  std::copy(next.values + m * stride, next.values + m * stride + padded(D), all.values + m * stride);
  all.most[m] = next.most[m], all.sum[m] = next.sum[m];
}

// Of `count` scores, -infinity behind them in the last vector.
inline float largest_score(const float* scores, int64_t count) {
  Vec largest = load(scores);
  for (int64_t i = kLanes; i < count; i += kLanes) largest = max(load(scores + i), largest);
  return max_lanes(largest);
}

// Scores to unnormalised weights 2^(score - most), in place. The array has room for whole vectors.
// Those before `first` are not seen. With a cap c scores s are c tanh(s / c).
inline void to_weights(float* scores, int64_t first, int64_t count, float cap, float& most, float& sum) {
  const int64_t skipped = first / kLanes * kLanes;
  scores += skipped, first -= skipped, count -= skipped;
  for (int64_t i = 0; cap && i < count; i += kLanes) store(scores + i, capped(load(scores + i), cap));
  for (int64_t i = 0; i < first; ++i) scores[i] = -INFINITY;
  for (int64_t i = count; i % kLanes; ++i) scores[i] = -INFINITY;
  most = largest_score(scores, count);
  const Vec shift = broadcast(most);
  Vec total{};
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vec weight = exp2_of_negative(load(scores + i) - shift);
    store(scores + i, weight);
    total += weight;
  }
  sum = sum_lanes(total);
}

}  // namespace foredraft
