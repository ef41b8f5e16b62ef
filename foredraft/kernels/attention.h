// Attention of some tokens of a row over the cache entries they see.
//
// Shape legend: T tokens of a tile, G query heads that share a key-value head, M = T * G queries of
// a tile, D head size.
//
// A token sees the first `prefix` entries of its slot and then, in a tree, its ancestors and itself
// (`extras`, ascending). What it sees is ranked in this order, and everything is defined over ranks,
// never over entries: the ranks are taken in chunks of kChunk, each chunk has its own maximum, sum
// and weighted values, taken up in the order of ranks, and chunks are folded together from the first
// to the last. So the same context gives the same bits wherever the entries lie, whoever else is in
// the forward and whichever threads compute the chunks.
//
// Speed comes from reading keys and values once for all queries of a tile. Keys are transposed and
// values are converted in pieces that stay in the nearest cache while all queries pass over them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "entries.h"
#include "matmul.h"
#include "softmax.h"
#include "team.h"

namespace foredraft {

constexpr int64_t kChunk = 256;  // ranks; part of what the result is defined by
constexpr int64_t kScoreStride = kChunk + kPair;  // scores are logarithms to base 2
constexpr float kLog2E = 1.44269504f;
constexpr int64_t kPanelFloats = 4096;  // of converted values: they stay in the nearest cache

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kVectorRegisters = 32;
#else
constexpr int kVectorRegisters = 16;
#endif

static_assert(kChunk % kRunEntries == 0 && kRunEntries % kPair == 0, "blocks within runs");

// ---- scores -------------------------------------------------------------------------------------

// A vector of words of the transposed keys: one dimension of float keys, two of bfloat16 ones.
inline void put_dimensions(Ints words, int64_t word, float* out, const float*) {
  store(out + word * kPair, (Vec)words);
}

inline void put_dimensions(Ints words, int64_t word, float* out, const bf16*) {
  store(out + 2 * word * kPair, (Vec)((Bits)words << 16));
  store(out + (2 * word + 1) * kPair, (Vec)((Bits)words & 0xffff0000u));
}

// The keys of kPair entries by dimensions: [D, kPair entries]. If there are only `count` entries,
// zeros stand for the others.
template <class Weight>
inline void transpose_keys(const Weight* keys, int64_t D, int64_t count, float* out) {
  constexpr int64_t kStep = kLanes * sizeof(float) / sizeof(Weight);  // dimensions of a vector
  for (int64_t first = 0; first < kPair; first += kLanes)
    for (int64_t d = 0; d < D; d += kStep) {
      const int64_t there = std::min(kStep, D - d);
      const Weight* source = keys + first * D + d;
      Ints columns[kLanes];
      if (first + kLanes <= count && there == kStep) {
        load_columns(source, D * int64_t(sizeof(Weight)), columns);
      } else {
        Ints rows[kLanes] = {};
        for (int64_t i = 0; i < std::min<int64_t>(kLanes, count - first); ++i)
          std::memcpy(&rows[i], source + i * D, size_t(there) * sizeof(Weight));
        load_columns(rows, sizeof rows[0], columns);
      }
      for (int64_t w = 0; w < there * kLanes / kStep; ++w)
        put_dimensions(columns[w], d * kLanes / kStep + w, out + first, keys);
    }
}

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
    for (; begin < end; ++begin, ++weight, value += values.D) {
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
                             const float* weights, float* out) {
  // Enough sums to hide the latency, none spilled.
  constexpr int P = kVectorRegisters == 32 ? 2 : Q > 3 ? 1 : 2;
  const auto pairs = [&](auto num_pairs, int64_t d) {
    weigh_values<Q, num_pairs>(values, range, d, weights, out + d, padded(D));
  };
  int64_t d = 0;
  for (; d + P * kPair <= D; d += P * kPair) pairs(std::integral_constant<int, P>{}, d);
  for (; d < D; d += kPair) pairs(std::integral_constant<int, 1>{}, d);
}

// ---- a tile -------------------------------------------------------------------------------------

// Where a thread computes: one tile at a time.
struct AttentionScratch {
  float* queries;     // [M, padded D]
  float* scores;      // [M, kScoreStride]; behind the chunk, those of kPair extras
  float* transposed;  // [D, kPair]
  float* panel;       // converted values [rows, padded D]
  float* chunk;       // Attended
  float* all;         // Attended

  static int64_t panel_rows(int64_t D) {
    return std::max<int64_t>(kRunEntries, kPanelFloats / padded(D) / kRunEntries * kRunEntries);
  }

  static int64_t size(int64_t M, int64_t D) {
    return M * (padded(D) + kScoreStride) + D * kPair + panel_rows(D) * padded(D) +
           2 * Attended::size(M, D);
  }

  static AttentionScratch in(float* memory, int64_t M, int64_t D) {
    AttentionScratch s;
    s.queries = memory;
    s.scores = s.queries + M * padded(D);
    s.transposed = s.scores + M * kScoreStride;
    s.panel = s.transposed + D * kPair;
    s.chunk = s.panel + panel_rows(D) * padded(D);
    s.all = s.chunk + Attended::size(M, D);
    return s;
  }
};

// Some tokens of a row at the query heads that share a key-value head.
template <class Weight>
struct AttentionTile {
  Entries<const Weight> keys, values;
  int64_t D, group;        // G
  const Visible* visible;  // [T]
  int64_t num_tokens;      // T
  Range next;              // entries of the chunk to come, to be prefetched
  AttentionScratch scratch;  // with queries, scaled; the G heads of a token are neighbours

  int64_t num_queries() const { return num_tokens * group; }

  // Whether a token has ranks in the chunk that begins here.
  bool reaches(int64_t token, int64_t begin) const { return visible[token].count() > begin; }

  // What all queries attended in the ranks [begin, begin + kChunk).
  void attend_chunk(int64_t begin, const Attended& out) const {
    int64_t common = begin + kChunk, longest = 0;  // prefixes, within the chunk
    for (int64_t t = 0; t < num_tokens; ++t) {
      common = std::min(common, visible[t].prefix);
      longest = std::max(longest, visible[t].prefix);
    }
    common = std::max(common, begin);
    longest = std::min(longest, begin + kChunk);
    for (int64_t entry = begin; entry < longest; entry += kPair) {
      if (const int64_t ahead = next.begin + entry - begin; ahead < next.end) {
        prefetch(keys.at(ahead));
        prefetch(values.at(ahead));
      }
      if (entry + kPair < std::max(longest, next.end)) prefetch_near(keys.at(entry + kPair));
      score_entries(entry, longest, entry - begin);
    }
    score_extras(begin);
    for (int64_t t = 0; t < num_tokens; ++t)
      if (reaches(t, begin))
        for (int64_t m = t * group; m < (t + 1) * group; ++m)
          to_weights(scratch.scores + m * kScoreStride,
                     std::min(visible[t].count() - begin, kChunk), out.most[m], out.sum[m]);
    std::fill(out.values, out.values + num_queries() * padded(D), 0.0f);
    weigh_common({begin, common}, out);
    for (int64_t t = 0; t < num_tokens; ++t) weigh_rest(t, begin, common, out);
  }

 private:
  // Pulls kPair entries towards the core.
  void prefetch(const Weight* entries) const {
    for (int64_t i = 0; i < kPair * D; i += 64 / int64_t(sizeof(Weight)))
      __builtin_prefetch(entries + i, 0, kToL2);
  }

  void prefetch_near(const Weight* entries) const {
    for (int64_t i = 0; i < kPair * D; i += 64 / int64_t(sizeof(Weight)))
      __builtin_prefetch(entries + i, 0, 3);
  }

  // Scores of all queries at kPair entries, into column `column`.
  void score_entries(int64_t entry, int64_t end, int64_t column) const {
    transpose_keys(keys.at(entry), D, end - entry, scratch.transposed);
    in_query_blocks(num_queries(), [&](auto count, int64_t first) {
      score_block<count>(scratch.transposed, D, scratch.queries + first * padded(D), padded(D),
                         scratch.scores + first * kScoreStride + column, kScoreStride);
    });
  }

  // Scores of the extras among the chunk's ranks go where their ranks are.
  void score_extras(int64_t begin) const {
    int64_t first = INT64_MAX, last = -1;
    for (int64_t t = 0; t < num_tokens; ++t) {
      const Range mine = visible[t].extras_within(begin, begin + kChunk);
      if (mine.begin == mine.end) continue;
      first = std::min<int64_t>(first, visible[t].extras[mine.begin]);
      last = std::max<int64_t>(last, visible[t].extras[mine.end - 1]);
    }
    if (last < 0) return;
    for (int64_t entry = first / kPair * kPair; entry <= last; entry += kPair) {
      score_entries(entry, last + 1, kChunk);
      for (int64_t t = 0; t < num_tokens; ++t) order_by_rank(t, begin, entry);
    }
  }

  // Moves those scores of a token's extras that were just computed.
  void order_by_rank(int64_t token, int64_t begin, int64_t entry) const {
    const Visible& sees = visible[token];
    const Range mine = sees.extras_within(begin, begin + kChunk);
    for (int64_t i = mine.begin; i < mine.end; ++i) {
      const int64_t column = sees.extras[i] - entry;
      if (column < 0 || column >= kPair) continue;
      for (int64_t m = token * group; m < (token + 1) * group; ++m) {
        float* scores = scratch.scores + m * kScoreStride;
        scores[sees.prefix + i - begin] = scores[kChunk + column];
      }
    }
  }

  // Ranks that all tokens see as the same entries. Few queries read the values as they are; for more
  // they are converted once.
  void weigh_common(Range range, const Attended& out) const {
    if (num_queries() <= 6 && D % kPair == 0)
      return weigh(values, range, 0, 0, num_queries(), out);
    const int64_t step = AttentionScratch::panel_rows(D);
    for (int64_t first = range.begin; first < range.end; first += step) {
      const Range part{first, std::min(first + step, range.end)};
      for (int64_t entry = part.begin; entry < part.end; ++entry)
        convert(values.at(entry), entry - part.begin);
      weigh(panel(), {0, part.end - part.begin}, first - range.begin, 0, num_queries(), out);
    }
  }

  // What a token sees in the chunk beyond that.
  void weigh_rest(int64_t token, int64_t begin, int64_t common, const Attended& out) const {
    const Visible& sees = visible[token];
    const int64_t stop = std::min(sees.count(), begin + kChunk);
    const int64_t step = AttentionScratch::panel_rows(D);
    for (int64_t first = common; first < stop; first += step) {
      const int64_t end = std::min(first + step, stop);
      for (int64_t rank = first; rank < end; ++rank) {
        const int64_t entry = rank < sees.prefix ? rank : sees.extras[rank - sees.prefix];
        convert(values.at(entry), rank - first);
      }
      weigh(panel(), {0, end - first}, first - begin, token * group, group, out);
    }
  }

  Panel<const float> panel() const { return {scratch.panel, padded(D)}; }

  // An entry's values as floats in lane order, into a row of the panel.
  void convert(const Weight* value, int64_t row) const {
    float* out = scratch.panel + row * padded(D);
    int64_t d = 0;
    for (; d + kPair <= D; d += kPair) convert_pair(value + d, out + d);
    if (d == D) return;
    Weight rest[kPair] = {};
    std::copy(value + d, value + D, rest);
    convert_pair(rest, out + d);
  }

  // Adds weighted entries for queries [first, first + count); the weights of the first entry are in
  // this column.
  template <class Source>
  void weigh(const Source& source, Range range, int64_t column, int64_t first,
             int64_t count, const Attended& out) const {
    if (range.begin >= range.end) return;
    in_query_blocks(count, [&](auto block, int64_t offset) {
      const int64_t m = first + offset;
      weigh_all_values<block>(source, range, D, scratch.scores + m * kScoreStride + column,
                              out.values + m * padded(D));
    });
  }
};

}  // namespace foredraft
