// Attention of the tokens of one forward over the cache entries they see.
//
// Shape legend: T tokens, G query heads that share a key-value head, M = tokens * G queries of a
// tile, C cache entries, D head size.
//
// A token sees the first `prefix` entries of its slot and then, in a tree, its ancestors and itself
// (`extras`, ascending). Its scores are laid out by rank among the entries it sees, and maximum,
// sum and weighted values run over ranks, never over entries. So the same context gives the same
// bits wherever the entries lie and whoever else is in the forward.
#pragma once

#include <cmath>

#include "matmul.h"
#include "team.h"

namespace foredraft {

constexpr int64_t kNearEntries = 128;  // values of so many stay in the nearest cache
constexpr int64_t kEntriesAhead = 64;  // keys and values are prefetched so far ahead

// What one token sees.
struct Visible {
  int64_t prefix;
  const int32_t* extras;
  int64_t num_extras;

  int64_t count() const { return prefix + num_extras; }
  int64_t end() const { return num_extras ? extras[num_extras - 1] + 1 : prefix; }
};

// Moves the scores of the extras behind those of the prefix. Ranks never exceed entries, so nothing
// is overwritten before it is read.
inline void order_by_rank(const Visible& visible, float* scores) {
  for (int64_t i = 0; i < visible.num_extras; ++i)
    scores[visible.prefix + i] = scores[visible.extras[i]];
}

// Scores to unnormalised weights e^(score - max), in place; returns one over their sum. The array
// has room for whole vectors.
inline float softmax(float* scores, int64_t count) {
  const float low = -INFINITY;
  for (int64_t i = count; i % kLanes; ++i) scores[i] = low;
  Vec most = load(scores);
  for (int64_t i = kLanes; i < count; i += kLanes) most = max(load(scores + i), most);
  const Vec shift = broadcast(max_lanes(most));
  Vec sum{};
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vec weight = exp(load(scores + i) - shift);
    store(scores + i, weight);
    sum += weight;
  }
  return 1.0f / sum_lanes(sum);
}

// The keys of kPair entries by words, which are one float or two bfloat16: [words, kPair entries].
// If there are only `count` entries, zeros stand for the others.
template <class Weight>
inline void transpose_keys(const Weight* keys, int64_t D, int64_t count, float* out) {
  constexpr int64_t kStep = kLanes * sizeof(float) / sizeof(Weight);  // dimensions of a vector
  for (int64_t half = 0; half < 2; ++half)
    for (int64_t d = 0; d < D; d += kStep) {
      const int64_t first = half * kLanes, there = std::min(kStep, D - d);
      const Weight* source = keys + first * D + d;
      Ints columns[kLanes];
      if (first + kLanes <= count && there == kStep) {
        load_columns(source, D * sizeof(Weight), columns);
      } else {
        Ints rows[kLanes] = {};
        for (int64_t i = 0; i < std::min<int64_t>(kLanes, count - first); ++i)
          std::memcpy(&rows[i], source + i * D, there * sizeof(Weight));
        load_columns(rows, sizeof rows[0], columns);
      }
      const int64_t words = there * kLanes / kStep;
      for (int64_t w = 0; w < words; ++w)
        store(out + (d * kLanes / kStep + w) * kPair + first, (Vec)columns[w]);
    }
}

// One dimension of a pair, of kLanes entries out of the transposed keys.
template <class Weight>
inline Vec key_vector(const float* words, int64_t pair, int which, int half) {
  words += half * kLanes;
  if (sizeof(Weight) == sizeof(float)) return load(words + (2 * pair + which) * kPair);
  const Bits word = (Bits)load(words + pair * kPair);
  return which ? (Vec)(word & 0xffff0000u) : (Vec)(word << 16);
}

// Scores of Q queries at kPair entries, whose keys are transposed: the even dimensions summed up in
// their order plus the odd ones. Not inlined: the sums need all registers.
template <int Q, class Weight>
__attribute__((noinline)) void score_block(const float* words, int64_t D, const float* queries,
                                           int64_t query_stride, float* scores,
                                           int64_t score_stride) {
  constexpr int kTogether = Q <= 3 ? 2 : 1;  // both sums at once, if they fit the registers
  const auto add_up = [&](auto pass) INLINE {
    Vec sum[kTogether][Q][2];
    UNROLL for (int i = 0; i < kTogether; ++i)
      UNROLL for (int q = 0; q < Q; ++q) sum[i][q][0] = sum[i][q][1] = Vec{};
    for (int64_t pair = 0; pair < D / 2; ++pair)
      UNROLL for (int i = 0; i < kTogether; ++i) {
        Vec low = key_vector<Weight>(words, pair, pass + i, 0);
        Vec high = key_vector<Weight>(words, pair, pass + i, 1);
        keep_in_register(low), keep_in_register(high);
        UNROLL for (int q = 0; q < Q; ++q) {
          const Vec factor = broadcast(queries[q * query_stride + 2 * pair + pass + i]);
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

// Ranks of which some queries sum up weighted values: entries [begin, end), where rank and entry are
// the same, and then extras.
struct Ranks {
  int64_t begin, end;
  const int32_t* extras;
  int64_t num_extras;
};

// P pairs of dimensions of Q queries: adds weight * value, rank by rank, to the sums in `out`, which
// start from zero when the ranks do. Query q has its weights at weights + q * weight_stride and its
// sums, in lane order, at out + q * out_stride; `values` is where these dimensions of entry 0 lie.
// Only `count` dimensions are there if it is less than P pairs. Not inlined: the sums need all
// registers.
template <int Q, int P, bool kWhole, class Weight>
__attribute__((noinline)) void weigh_values(const Ranks& ranks, const Weight* values, int64_t D,
                                            int64_t count, const float* weights,
                                            int64_t weight_stride, float* out,
                                            int64_t out_stride) {
  Vec sum[Q][2 * P];
  UNROLL for (int q = 0; q < Q; ++q)
    UNROLL for (int i = 0; i < 2 * P; ++i)
      sum[q][i] = ranks.begin ? load(out + q * out_stride + i * kLanes) : Vec{};
  Weight padded_value[P * kPair] = {};
  const auto add = [&](const float* weight, const Weight* value) INLINE {
    if constexpr (!kWhole) value = std::copy(value, value + count, padded_value) - count;
    UNROLL for (int p = 0; p < P; ++p) {
      const Vec first = load_first(value + p * kPair), second = load_second(value + p * kPair);
      asm("" : "+r"(weight));  // read the weights again: registers are short
      UNROLL for (int q = 0; q < Q; ++q) {
        const Vec factor = broadcast(weight[q * weight_stride]);
        sum[q][2 * p] = fma(factor, first, sum[q][2 * p]);
        sum[q][2 * p + 1] = fma(factor, second, sum[q][2 * p + 1]);
      }
    }
  };
  for (int64_t rank = ranks.begin; rank < ranks.end; ++rank) {
    __builtin_prefetch(values + (rank + kEntriesAhead) * D, 0, kToL2);
    add(weights + rank, values + rank * D);
  }
  for (int64_t i = 0; i < ranks.num_extras; ++i)
    add(weights + ranks.end + i, values + ranks.extras[i] * D);
  UNROLL for (int q = 0; q < Q; ++q)
    UNROLL for (int i = 0; i < 2 * P; ++i) store(out + q * out_stride + i * kLanes, sum[q][i]);
}

// All dimensions of Q queries: sums at out[q * padded(D)].
template <int Q, class Weight>
inline void weigh_all_values(const Ranks& ranks, const Weight* values_CD, int64_t D,
                             const float* weights, int64_t weight_stride, float* out) {
  constexpr int P = Q > 3 ? 1 : Q > 1 ? 2 : 4;  // enough sums to hide the latency, none spilled
  const auto pairs = [&](auto num_pairs, auto whole, int64_t d) {
    weigh_values<Q, num_pairs, whole>(ranks, values_CD + d, D, D - d, weights, weight_stride,
                                      out + d, padded(D));
  };
  int64_t d = 0;
  for (; d + P * kPair <= D; d += P * kPair)
    pairs(std::integral_constant<int, P>{}, std::true_type{}, d);
  for (; d + kPair <= D; d += kPair) pairs(std::integral_constant<int, 1>{}, std::true_type{}, d);
  if (d < D) pairs(std::integral_constant<int, 1>{}, std::false_type{}, d);
}

// One tile: some tokens of a row at query heads that share a key-value head.
template <class Weight>
struct AttentionTile {
  const Weight* keys_CD;
  const Weight* values_CD;
  int64_t D;
  int64_t group;           // G
  Activations queries;     // [M, D], scaled; the G heads of a token are neighbours
  float* transposed;       // scratch [words of D, kPair]
  const Visible* visible;  // [T]
  int64_t num_tokens;      // T
  float* scores;           // scratch [M, score_stride]
  int64_t score_stride;
  float* attended;         // scratch [M, D], in lane order
  float* factors;          // scratch [M], one over the sum of weights

  // put(token, head of the group, values [D] in lane order, factor) takes what a head attended.
  template <class Put>
  void run(const Put& put) const {
    score();
    int64_t common = visible[0].prefix;  // entries that all tokens see
    for (int64_t t = 0; t < num_tokens; ++t) {
      common = std::min(common, visible[t].prefix);
      for (int64_t m = t * group; m < (t + 1) * group; ++m) {
        order_by_rank(visible[t], scores + m * score_stride);
        factors[m] = softmax(scores + m * score_stride, visible[t].count());
      }
    }
    for (int64_t rank = 0; rank < common; rank += kNearEntries)
      weigh({rank, std::min(rank + kNearEntries, common), nullptr, 0}, 0, num_tokens * group);
    for (int64_t t = 0; t < num_tokens; ++t) {
      weigh({common, visible[t].prefix, visible[t].extras, visible[t].num_extras}, t * group, group);
      for (int64_t m = t * group; m < (t + 1) * group; ++m)
        put(t, m - t * group, attended + m * padded(D), factors[m]);
    }
  }

 private:
  // Scores of all queries at all entries that any token sees.
  void score() const {
    int64_t end = 0;
    for (int64_t t = 0; t < num_tokens; ++t) end = std::max(end, visible[t].end());
    for (int64_t entry = 0; entry < end; entry += kPair) {
      const Weight* keys = keys_CD + entry * D;
      const int64_t ahead = entry + kEntriesAhead;  // behind the last key come the values
      const Weight* next = ahead < end ? keys_CD + ahead * D : values_CD + (ahead - end) * D;
      for (int64_t i = 0; i < kPair * D; i += 64 / sizeof(Weight))
        __builtin_prefetch(next + i, 0, kToL2);
      transpose_keys(keys, D, end - entry, transposed);
      score_entries(entry);
    }
  }

  // Scores of all queries at the entries that are transposed.
  void score_entries(int64_t entry) const {
    const int64_t count = num_tokens * group, blocks = (count + 5) / 6;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t first = count * b / blocks, stop = count * (b + 1) / blocks;
      const auto queries_of = [&](auto num_queries) {
        score_block<num_queries, Weight>(transposed, D, queries.row(first), queries.stride,
                                 scores + first * score_stride + entry, score_stride);
      };
      switch (stop - first) {
        case 1: queries_of(std::integral_constant<int, 1>{}); break;
        case 2: queries_of(std::integral_constant<int, 2>{}); break;
        case 3: queries_of(std::integral_constant<int, 3>{}); break;
        case 4: queries_of(std::integral_constant<int, 4>{}); break;
        case 5: queries_of(std::integral_constant<int, 5>{}); break;
        default: queries_of(std::integral_constant<int, 6>{}); break;
      }
    }
  }

  // Adds the ranks' weighted values for queries [first, first + count).
  void weigh(const Ranks& ranks, int64_t first, int64_t count) const {
    if (ranks.begin == ranks.end && ranks.num_extras == 0) return;
    for (int64_t end = first + count; first < end;) {
      const auto queries_of = [&](auto num_queries) {
        weigh_all_values<num_queries>(ranks, values_CD, D, scores + first * score_stride,
                                      score_stride, attended + first * padded(D));
        first += num_queries;
      };
      const int64_t left = end - first;
      if (left >= 6) queries_of(std::integral_constant<int, 6>{});
      else if (left == 3 || left == 5) queries_of(std::integral_constant<int, 3>{});
      else if (left >= 2) queries_of(std::integral_constant<int, 2>{});
      else queries_of(std::integral_constant<int, 1>{});
    }
  }
};

}  // namespace foredraft
