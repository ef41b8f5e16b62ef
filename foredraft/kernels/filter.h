// Which tokens top-k, top-p and min-p leave: those whose logit is not below a cut. The compiled half of
// `law_of` in core/sampling.py, which says what the filters are.
//
// Sums are of doubles in an order of their own that nothing but the row decides, so the same row has
// the same cut whatever is computed beside it.
//
// Shape legend: V vocabulary.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "draw.h"
#include "simd.h"

namespace foredraft {
namespace noise {

struct Filters {
  int64_t top_k;  // 0: all
  double top_p, min_p;
  float scale;  // of the logits
};

constexpr float kLowest = -std::numeric_limits<float>::infinity();

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline int64_t whole_blocks(int64_t count) { return (count + kColumns - 1) / kColumns * kColumns; }

// Sums of columns: of numbers that lie kColumns apart.
struct Sums {
  double of[kColumns] = {};

  double all() const {
    double sum = 0;
    for (double one : of) sum += one;
    return sum;
  }
};

inline SEPARATE void add(Sums& sums, const float* __restrict block) {
  double* __restrict of = sums.of;
  for (int i = 0; i < kColumns; ++i) of[i] += double(block[i]);
}

// The sum of exp((logit - largest) * scale), which are written to `weights`: [count], filled up with
// zeros to whole blocks.
inline double weigh(const float* logits, int64_t count, float largest, float scale, float* weights) {
  Sums sums;
  for (int64_t start = 0; start < count; start += kColumns) {
    float last[kColumns];
    const float* block = logits + start;
    if (start + kColumns > count) {
      std::fill(std::copy(block, logits + count, last), last + kColumns, kLowest);
      block = last;
    }
    for (int i = 0; i < kColumns; i += foredraft::kLanes)
      store(weights + start + i, foredraft::exp((load(block + i) - largest) * scale));
    add(sums, weights + start);
  }
  return sums.all();
}

// The sum of those that reach `least`; count is one of whole blocks.
inline double sum_from(const float* weights, int64_t count, float least) {
  Sums sums;
  for (int64_t start = 0; start < count; start += kColumns) {
    float block[kColumns];
    for (int i = 0; i < kColumns; i += foredraft::kLanes) {
      const Vec some = load(weights + start + i);
      store(block + i, some >= least ? some : Vec{});
    }
    add(sums, block);
  }
  return sums.all();
}

// Copies those that reach `least` (or those that do not) to `kept`, which may be `values`; how many.
template <bool reach>
inline int64_t keep(const float* values, int64_t count, float least, float* kept) {
  int64_t num_kept = 0;
  for (int64_t start = 0; start < count; start += foredraft::kLanes) {
    const int64_t size = std::min<int64_t>(foredraft::kLanes, count - start);
    const float* some = values + start;
    if (reach && size == foredraft::kLanes && !(max_lanes(load(some)) >= least)) continue;
    for (int64_t i = 0; i < size; ++i) {
      const float value = some[i];
      kept[num_kept] = value;
      num_kept += (value >= least) == reach;
    }
  }
  return num_kept;
}

// The smallest logit whose weight reaches `least`.
inline SEPARATE float smallest_from(const float* logits, const float* weights, int64_t count, float least) {
  Vec largest = broadcast(kLowest);  // of the negated
  int64_t start = 0;
  for (; start + foredraft::kLanes <= count; start += foredraft::kLanes)
    largest = max(load(weights + start) >= least ? -load(logits + start) : broadcast(kLowest), largest);
  float smallest = -max_lanes(largest);
  for (; start < count; ++start)
    if (weights[start] >= least) smallest = std::min(smallest, logits[start]);
  return smallest;
}

// Room that is kept from row to row: fresh pages take longer than what is done with them.
struct Room {
  std::vector<float> logits, weights, heavy;
};

// The k largest logits, with all that equal the last of them, into `kept`; that last one.
inline float keep_largest(const Row<float>& row, const float* logits, int64_t vocab, int64_t k,
                          std::vector<float>& kept) {
  std::vector<float> most = row.group_max();  // k groups have maxima that reach the k-th of them
  float floor = kLowest;
  if (k <= int64_t(most.size())) {
    std::nth_element(most.begin(), most.begin() + (k - 1), most.end(), std::greater<float>());
    floor = most[k - 1];
  }
  kept.resize(vocab);
  kept.resize(keep<true>(logits, vocab, floor, kept.data()));
  most = kept;
  std::nth_element(most.begin(), most.begin() + (k - 1), most.end(), std::greater<float>());
  floor = most[k - 1];
  kept.resize(keep<true>(kept.data(), int64_t(kept.size()), floor, kept.data()));
  return floor;
}

// The largest weight that at least `top_p` of the sum `total` reaches: that of the last token of the
// nucleus. Halves the numbers it may be, and with them the weights that are still to be added up.
inline float nucleus_end(const std::vector<float>& weights, int64_t count, double top_p, double total,
                         std::vector<float>& heavy) {
  // Those below this are too few in all to complete the nucleus.
  const float least = float(0.5 * (1.0 - top_p) * total / double(count));
  heavy.resize(weights.size() + kColumns);
  int64_t left = keep<true>(weights.data(), int64_t(weights.size()), least, heavy.data());
  uint32_t low = bits_of(least), high = bits_of(1.0f);
  double above = 0;  // the sum of those that are no longer left because they are larger
  while (low < high) {
    std::fill_n(heavy.begin() + left, kColumns, 0.0f);
    const uint32_t middle = low + (high - low + 1) / 2;
    const float bound = float_of(middle);
    const double sum = above + sum_from(heavy.data(), whole_blocks(left), bound);
    const bool is_higher = sum >= top_p * total;
    if (is_higher) {
      low = middle;
      left = keep<true>(heavy.data(), left, bound, heavy.data());
    } else {
      high = middle - 1, above = sum;
      left = keep<false>(heavy.data(), left, bound, heavy.data());
    }
  }
  return float_of(low);
}

// The smallest logit that stays. The row's largest has been found.
inline float cut_of(const Row<float>& row, const float* logits, int64_t vocab, const Filters& filters) {
  thread_local Room room;
  float cut = kLowest;
  int64_t count = vocab;
  if (0 < filters.top_k && filters.top_k < vocab) {
    cut = keep_largest(row, logits, vocab, filters.top_k, room.logits);
    logits = room.logits.data(), count = int64_t(room.logits.size());
  }
  if (filters.top_p >= 1 && filters.min_p <= 0) return cut;
  room.weights.resize(whole_blocks(count));
  const double total =
      weigh(logits, count, float(row.largest()), filters.scale, room.weights.data());
  float least = float(filters.min_p);
  if (filters.top_p < 1)
    least = std::max(least, nucleus_end(room.weights, count, filters.top_p, total, room.heavy));
  return smallest_from(logits, room.weights.data(), count, least);
}

}  // namespace noise
}  // namespace foredraft
