// Scores and weighted values in float32 multiply-adds.
//
// Shape legend: see attention.h; Q queries of a block, P pairs of vectors.
//
// Keys are transposed and values are converted in pieces that stay in the nearest cache while all
// queries pass over them.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "entries.h"
#include "simd.h"
#include "softmax.h"
#include "team.h"
#include "transpose.h"

namespace foredraft {

constexpr int64_t kPanelFloats = 4096;  // of converted values: they stay in the nearest cache
constexpr int64_t kWeighedAtOnce = 16;  // ranks of few queries between two pauses

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kVectorRegisters = 32;
#else
constexpr int kVectorRegisters = 16;
#endif

static_assert(kChunk % kRunEntries == 0 && kRunEntries % kPair == 0, "blocks within runs");

// ---- scores -------------------------------------------------------------------------------------

// A vector of words of the transposed keys: one dimension of float keys, two of bfloat16 ones, four
// of int8 ones.
inline void put_dimensions(Ints words, int64_t word, float* out, const float*) {
  store(out + word * kPair, (Vec)words);
}

inline void put_dimensions(Ints words, int64_t word, float* out, const int8_t*) {
  UNROLL for (int i = 0; i < 4; ++i) {
    const Ints numbers = words << (24 - 8 * i) >> 24;
    store(out + (4 * word + i) * kPair, __builtin_convertvector(numbers, Vec));
  }
}

inline void put_dimensions(Ints words, int64_t word, float* out, const bf16*) {
  store(out + 2 * word * kPair, (Vec)((Bits)words << 16));
  store(out + (2 * word + 1) * kPair, (Vec)((Bits)words & 0xffff0000u));
}

// The keys of kPair entries by dimensions: [transposed_rows(D), kPair entries]. Calls between() for each
// vector of them.
template <class Number, class Between>
inline void transpose_pair(const Number* keys, int64_t stride, int64_t D, int64_t count, float* out,
                           const Between& between) {
  const auto put = [&](Ints words, int64_t word, int64_t first) INLINE {
    if (word == 0) between();
    put_dimensions(words, word, out + first, keys);
  };
  transpose_keys(keys, stride, D, kPair, count, put);
}

// Whole words of them.
inline int64_t transposed_rows(int64_t D) { return ceil_div(D, 4) * 4; }

// Scores of Q queries at kPair entries, whose keys are transposed: the even dimensions summed up in
// their order plus the odd ones. Not inlined: the sums need all registers.
template <int Q>
__attribute__((noinline)) void score_block(const float* keys, int64_t D, const float* queries,
                                           int64_t query_stride, float* scores,
                                           int64_t score_stride) {
  constexpr int kTogether = 4 * Q + 5 <= kVectorRegisters ? 2 : 1;  // both sums at once, if they fit
  const auto add_up = [&](auto pass) INLINE {
    Vec sum[kTogether][Q][2];
    UNROLL for (int i = 0; i < kTogether; ++i)
      UNROLL for (int q = 0; q < Q; ++q) sum[i][q][0] = sum[i][q][1] = Vec{};
    for (int64_t d = pass; d < D; d += 2)
      UNROLL for (int i = 0; i < kTogether; ++i) {
        const Vec low = load_to_register(keys + (d + i) * kPair);
        const Vec high = load_to_register(keys + (d + i) * kPair + kLanes);
        UNROLL for (int q = 0; q < Q; ++q) {
          const Vec factor = broadcast(queries[q * query_stride + d + i]);
          sum[i][q][0] = fma(factor, low, sum[i][q][0]);
          sum[i][q][1] = fma(factor, high, sum[i][q][1]);
        }
      }
    UNROLL for (int q = 0; q < Q; ++q)
      UNROLL for (int half = 0; half < 2; ++half) {
        float* target = scores + q * score_stride + half * kLanes;
        const Vec even = pass ? load(target) : sum[0][q][half];
        store(target, pass + kTogether == 2 ? even + sum[kTogether - 1][q][half] : even);
      }
  };
  add_up(std::integral_constant<int, 0>{});
  if constexpr (kTogether == 1) add_up(std::integral_constant<int, 1>{});
}

// Calls block(integral constant Q, first query) for `count` queries in blocks of at most six.
template <class Block>
inline void in_query_blocks(int64_t count, const Block& block) {
  const int64_t blocks = (count + 5) / 6;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t first = count * b / blocks;
    switch (count * (b + 1) / blocks - first) {
      case 1: block(std::integral_constant<int, 1>{}, first); break;
      case 2: block(std::integral_constant<int, 2>{}, first); break;
      case 3: block(std::integral_constant<int, 3>{}, first); break;
      case 4: block(std::integral_constant<int, 4>{}, first); break;
      case 5: block(std::integral_constant<int, 5>{}, first); break;
      default: block(std::integral_constant<int, 6>{}, first); break;
    }
  }
}

// A pair of vectors as floats in lane order.
inline void convert_pair(const float* source, float* out) { std::copy(source, source + kPair, out); }

inline void convert_pair(const int8_t* source, float* out) {
  store(out, load_first(source));
  store(out + kLanes, load_second(source));
}

inline void convert_pair(const bf16* source, float* out) {
  Bits words;
  std::memcpy(&words, source, sizeof words);
  store(out, (Vec)(words << 16));
  store(out + kLanes, (Vec)(words & 0xffff0000u));
}

// ---- weighted values ----------------------------------------------------------------------------

// P pairs of dimensions of Q queries: adds weight * value, entry by entry, to the sums at `out`.
// Query q has its weights at weights + q * kScoreStride, that of the first entry in front; the
// dimensions begin at d. Not inlined: the sums need all registers.
template <int Q, int P, class Source>
__attribute__((noinline)) void weigh_values(const Source& values, Range range, int64_t d,
                                            const float* weight, float* out, int64_t out_stride) {
  Vec sum[Q][2 * P];
  UNROLL for (int q = 0; q < Q; ++q)
    UNROLL for (int i = 0; i < 2 * P; ++i) sum[q][i] = load(out + q * out_stride + i * kLanes);
  for (int64_t begin = range.begin; begin < range.end;) {
    const int64_t end = std::min(range.end, begin / kRunEntries * kRunEntries + kRunEntries);
    const auto* value = values.at(begin) + d;
    for (; begin < end; ++begin, ++weight, value += values.stride) {
      UNROLL for (int p = 0; p < P; ++p) {
        Vec first = load_first(value + p * kPair), second = load_second(value + p * kPair);
        keep_in_register(first), keep_in_register(second);
        if (kVectorRegisters == 16) asm("" : "+r"(weight));  // read them again: registers are short
        UNROLL for (int q = 0; q < Q; ++q) {
          const Vec factor = broadcast(weight[q * kScoreStride]);
          sum[q][2 * p] = fma(factor, first, sum[q][2 * p]);
          sum[q][2 * p + 1] = fma(factor, second, sum[q][2 * p + 1]);
        }
      }
    }
  }
  UNROLL for (int q = 0; q < Q; ++q)
    UNROLL for (int i = 0; i < 2 * P; ++i) store(out + q * out_stride + i * kLanes, sum[q][i]);
}

// All dimensions, which come in whole pairs.
template <int Q, class Source>
inline void weigh_all_values(const Source& values, Range range, int64_t D,
                             const float* weights, float* out, int64_t out_stride) {
  // Enough sums to hide the latency, none spilled.
  constexpr int P = kVectorRegisters == 32 ? 2 : Q > 3 ? 1 : 2;
  const auto pairs = [&](auto num_pairs, int64_t d) {
    weigh_values<Q, num_pairs>(values, range, d, weights, out + d, out_stride);
  };
  int64_t d = 0;
  for (; d + P * kPair <= D; d += P * kPair) pairs(std::integral_constant<int, P>{}, d);
  for (; d < D; d += kPair) pairs(std::integral_constant<int, 1>{}, d);
}

// ---- both ---------------------------------------------------------------------------------------

// The arithmetic of attention.h. Ranks are added one by one.
template <class Number>
class FloatAttention {
 public:
  static constexpr int64_t kScored = kPair;  // entries that are scored together
  static constexpr int64_t kWeighed = 1;     // ranks whose values are added together
  static constexpr bool kHasWindows = true;  // and caps

  float* queries;  // [M, padded D], scaled
  float* scores;   // [M, kScoreStride], then weights

  static int64_t size(int64_t M, int64_t D) {
    return M * (padded(D) + kScoreStride) + transposed_rows(D) * kPair + panel_rows(D) * padded(D);
  }

  FloatAttention(float* memory, int64_t M, int64_t D)
      : queries(memory),
        scores(queries + M * padded(D)),
        M_(M),
        D_(D),
        transposed_(scores + M * kScoreStride),
        panel_(transposed_ + transposed_rows(D) * kPair) {}

  // The queries are there.
  void begin() const {}

  // How often between() is called for so many ranks that are scored, and weighed for all queries. The
  // more often, the less is fetched at a time, and the less the core waits for it.
  int64_t num_pauses(int64_t scored, int64_t weighed) const {
    return ceil_div(scored, kScored) * (kPair / kLanes) + M_ + ceil_div(weighed, weighed_at_once());
  }

  // Scores of all queries at entries that lie behind one another, into columns from `column` on.
  // What is behind their last one is nobody's. Now and then between() is called.
  template <class Between>
  void score(const Entries<const Number>& keys, Range range, int64_t column,
             const Between& between) const {
    for (; range.begin < range.end; range.begin += kScored, column += kScored) {
      transpose_pair(keys.at(range.begin), keys.stride, D_, range.end - range.begin, transposed_,
                     between);
      in_query_blocks(M_, [&](auto block, int64_t first) {
        score_block<block>(transposed_, D_, queries + first * padded(D_), padded(D_),
                           scores + first * kScoreStride + column, kScoreStride);
      });
      if constexpr (kIsScaled<Number>) multiply_scores(keys, range, column);
    }
  }

  // The scores of a query's ranks become weights. Others see ranks up to `end`.
  void weights_of(int64_t m, Range ranks, int64_t end, float cap, const Attended& out) const {
    (void)end;
    to_weights(scores + m * kScoreStride, ranks.begin, ranks.end, cap, out.most[m], out.sum[m]);
  }

  // Nothing is added yet.
  void clear(const Attended& out) const {
    std::fill(out.values, out.values + M_ * attended_width(D_), 0.0f);
  }

  // Adds what queries attended at entries that stand for the same ranks of all who see them: those of
  // columns [first, common), which all do; that of column 0 lies where the range begins. Returns up to
  // where it was added for everybody; the rest is for weigh_rest.
  // Few queries read the values as they are; for more they are converted once.
  template <class Between>
  int64_t weigh_shared(const Entries<const Number>& values, Range range, int64_t first,
                       int64_t common, const Attended& out, const Between& between) const {
    const auto value = [&](int64_t column) { return values.at(range.begin + column); };
    for (; first < common; first += weighed_at_once()) {
      const Range columns{first, std::min(first + weighed_at_once(), common)};
      const Range entries{range.begin + columns.begin, range.begin + columns.end};
      if (reads_values_as_they_are()) weigh(values, entries, first, {0, M_}, out);
      else weigh_converted(value, columns, {0, M_}, out);
      between();
    }
    return common;
  }

  // What weigh_rest is called for: so many queries at a time, and then all again.
  void part(int64_t) const {}
  void whole() const {}

  // Adds for some queries what is weighed by these columns: value(column) is where they lie.
  template <class Value>
  void weigh_rest(const Value& value, Range columns, Range queries, const Attended& out) const {
    weigh_converted(value, columns, queries, out);
  }

 private:
  const int64_t M_, D_;
  float* const transposed_;  // [transposed_rows(D), kPair]
  float* const panel_;       // converted values [rows, padded D]

  bool reads_values_as_they_are() const { return M_ <= 6 && D_ % kPair == 0; }

  int64_t weighed_at_once() const {
    return reads_values_as_they_are() ? kWeighedAtOnce : panel_rows(D_);
  }

  static int64_t panel_rows(int64_t D) {
    return std::max<int64_t>(kRunEntries, kPanelFloats / padded(D) / kRunEntries * kRunEntries);
  }

  // Scores of up to kScored keys have their scales. What lies behind the last key is nobody's.
  void multiply_scores(const Entries<const Number>& keys, Range range, int64_t column) const {
    float scales[kScored] = {};
    put_scales(keys, {range.begin, std::min(range.end, range.begin + kScored)}, scales);
    for (int64_t m = 0; m < M_; ++m)
      UNROLL for (int64_t i = 0; i < kScored; i += kLanes) {
        float* const some = scores + m * kScoreStride + column + i;
        store(some, load(some) * load(scales + i));
      }
  }

  template <class Value>
  void weigh_converted(const Value& value, Range columns, Range queries,
                       const Attended& out) const {
    const int64_t step = panel_rows(D_);
    for (int64_t first = columns.begin; first < columns.end; first += step) {
      const int64_t end = std::min(first + step, columns.end);
      for (int64_t column = first; column < end; ++column) convert(value(column), column - first);
      weigh(Panel<const float>{panel_, padded(D_)}, {0, end - first}, first, queries, out);
    }
  }

  // An entry's values as floats in lane order, into a row of the panel.
  void convert(const Number* value, int64_t row) const {
    float* out = panel_ + row * padded(D_);
    int64_t d = 0;
    for (; d + kPair <= D_; d += kPair) convert_pair(value + d, out + d);
    if (d == D_) return;
    Number rest[kPair] = {};
    std::copy(value + d, value + D_, rest);
    convert_pair(rest, out + d);
  }

  // Adds weighted entries; the weights of the first are in this column.
  template <class Source>
  void weigh(const Source& source, Range range, int64_t column, Range queries,
             const Attended& out) const {
    if (range.begin >= range.end) return;
    in_query_blocks(queries.end - queries.begin, [&](auto block, int64_t offset) {
      const int64_t m = queries.begin + offset;
      weigh_all_values<block>(source, range, D_, scores + m * kScoreStride + column,
                              out.values + m * attended_width(D_), attended_width(D_));
    });
  }
};

}  // namespace foredraft
