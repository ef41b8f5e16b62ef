// Scores and weighted values on tiles (amx.h), of keys and values in bfloat16.
//
// Shape legend: see attention.h; S steps of 32 dimensions.
//
// Queries and weights are two bfloat16 parts each, 16 bits of them, as activations are (tiles.h): first
// the high parts are multiplied and added, then the low ones. Scores add up 32 dimensions at a time,
// weighted values 32 ranks at a time, counted from the beginning of the chunk: ranks that a token
// does not see are zeros there. So a query's numbers are the same whatever is computed beside it.
//
// Words of two bfloat16 numbers are what tiles multiply. Of keys they hold two dimensions, as they lie
// in the cache; of values the ranks r and r + 16, which spares weights any shuffling: the words of
// weights are made of two vectors that lie behind one another.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "amx.h"
#include "each.h"
#include "entries.h"
#include "simd.h"
#include "softmax.h"
#include "team.h"
#include "tiles.h"
#include "transpose.h"

namespace foredraft {

constexpr int64_t kTileWords = kTileBytes / 4;
constexpr int64_t kTileColumns = 16;

// Queries go over tiles in blocks of equally many; the last begins early enough for that.
struct QueryBlocks {
  Range queries;
  int64_t count, rows;

  explicit QueryBlocks(Range queries)
      : queries(queries),
        count((size() + kTileRows - 1) / kTileRows),
        rows((size() + count - 1) / count) {}

  // Blocks that have no query twice.
  static QueryBlocks apart(Range queries) {
    QueryBlocks blocks(queries);
    while (blocks.size() % blocks.rows) --blocks.rows;
    blocks.count = blocks.size() / blocks.rows;
    return blocks;
  }

  int64_t size() const { return queries.end - queries.begin; }
  int64_t first(int64_t block) const {
    return std::min(queries.begin + block * rows, queries.end - rows);
  }
  // Tiles 0 to 3 are sums, 4 and 5 keys or values, 6 and 7 queries or weights.
  TileShape shape() const {
    const uint8_t count = uint8_t(rows);
    return {{count, count, count, count, kTileRows, kTileRows, count, count}};
  }
};

// The arithmetic of attention.h. Ranks are added by the 32.
class TileAttention {
 public:
  static constexpr int64_t kScored = kRunEntries;
  static constexpr int64_t kWeighed = kTileInputs;
  static_assert(kScored == 2 * kTileColumns && kChunk % kWeighed == 0, "whole tiles");

  float* queries;  // [M, padded D], scaled
  float* scores;   // [M, kScoreStride], then weights: of 32 ranks 16 words high parts and 16 low ones

  static int64_t size(int64_t M, int64_t D) {
    const int64_t tiles = steps(D) * (2 + kChunk / kTileColumns) + 1;  // and room for alignment
    return M * (padded(D) + kScoreStride + steps(D) * kTileInputs) + tiles * kTileWords;
  }

  TileAttention(float* memory, int64_t M, int64_t D)
      : queries(memory), M_(M), D_(D), S_(steps(D)), blocks_({0, M}) {
    const auto aligned = (uintptr_t(memory + M * padded(D)) + kTileRowBytes - 1) / kTileRowBytes;
    scores = reinterpret_cast<float*>(aligned * kTileRowBytes);
    parts_ = reinterpret_cast<char*>(scores + M * kScoreStride);
    keys_ = reinterpret_cast<float*>(parts_ + S_ * 2 * part_bytes());
    values_ = keys_ + S_ * 2 * kTileWords;
  }

  // Takes over the queries, and the thread's tiles.
  void begin() const {
    TileSession::shape(blocks_.shape());
    std::memset(keys_, 0, size_t(S_ * 2 * kTileBytes));
    for (int64_t m = 0; m < M_; ++m)
      for (int64_t s = 0; s < S_; ++s) {
        alignas(64) float row[kTileInputs] = {};
        const int64_t d = s * kTileInputs;
        std::copy_n(queries + m * padded(D_) + d, std::min(kTileInputs, D_ - d), row);
        put_parts<float>(row, kTileInputs, parts_ + 2 * s * part_bytes() + m * kTileRowBytes,
                         part_bytes());
      }
  }

  void score(const bf16* keys, int64_t count, int64_t column) const {
    transpose_keys(keys, D_, kScored, count, [&](Ints words, int64_t word, int64_t first) INLINE {
      float* const tile = keys_ + (first / kTileColumns * S_ + word / kTileRows) * kTileWords;
      store(tile + word % kTileRows * kTileColumns + first % kTileColumns, (Vec)words);
    });
    int64_t block = 0;
    for (; block + 2 <= blocks_.count; block += 2) score_blocks<2>(block, column);
    if (block < blocks_.count) score_blocks<1>(block, column);
  }

  void weights_of(int64_t m, int64_t count, const Attended& out) const {
    float* const row = scores + m * kScoreStride;
    for (int64_t i = count; i % kTileInputs; ++i) row[i] = -INFINITY;
    const int64_t whole = (count + kTileInputs - 1) / kTileInputs * kTileInputs;
    to_weights(row, whole, out.most[m], out.sum[m]);
    for (int64_t i = 0; i < whole; i += kTileInputs) split_weights(row + i);
  }

  void weigh_common(const Entries<const bf16>& values, Range range, const Attended& out) const {
    const int64_t count = range.end - range.begin;
    interleave([&](int64_t column) { return values.at(range.begin + column); }, {0, count});
    weigh<true>(blocks_, {0, count}, out);
  }

  template <class Value>
  void weigh_rest(const Value& value, Range columns, Range queries, const Attended& out) const {
    interleave(value, columns);
    const QueryBlocks blocks = QueryBlocks::apart(queries);
    if (blocks.rows != blocks_.rows) TileSession::shape(blocks.shape());
    weigh<false>(blocks, columns, out);
    if (blocks.rows != blocks_.rows) TileSession::shape(blocks_.shape());
  }

 private:
  const int64_t M_, D_, S_;
  const QueryBlocks blocks_;
  char* parts_;    // of queries [S, high and low, M, 32 dimensions]
  float* keys_;    // words [16 entries and 16 more, S, 16 pairs of dimensions, 16 entries]
  float* values_;  // words [steps of 32 ranks, 2 S, 16 pairs of ranks, 16 dimensions in lane order]

  static int64_t steps(int64_t D) { return (D + kTileInputs - 1) / kTileInputs; }

  int64_t part_bytes() const { return M_ * kTileRowBytes; }

  template <int kBlocks>
  void score_blocks(int64_t block, int64_t column) const {
    Tiles tiles(blocks_.shape());
    each<2 * kBlocks>([&](auto sum) INLINE { tiles.template zero<sum.value>(); });
    const int64_t first[2] = {blocks_.first(block), blocks_.first(block + kBlocks - 1)};
    for (int64_t s = 0; s < S_; ++s) {
      tiles.template load<4>(keys_ + s * kTileWords, kTileRowBytes);
      tiles.template load<5>(keys_ + (S_ + s) * kTileWords, kTileRowBytes);
      each<kBlocks>([&](auto b) INLINE {
        const char* const high = parts_ + 2 * s * part_bytes() + first[b.value] * kTileRowBytes;
        tiles.template load<6>(high, kTileRowBytes);
        tiles.template load<7>(high + part_bytes(), kTileRowBytes);
        tiles.template multiply<2 * b.value, 6, 4>();
        tiles.template multiply<2 * b.value + 1, 6, 5>();
        tiles.template multiply<2 * b.value, 7, 4>();
        tiles.template multiply<2 * b.value + 1, 7, 5>();
      });
    }
    each<2 * kBlocks>([&](auto sum) INLINE {
      float* const out = scores + first[sum.value / 2] * kScoreStride + column;
      tiles.template store<sum.value>(out + sum.value % 2 * kTileColumns, kScoreStride * 4);
    });
  }

  // 32 weights to 16 words of high parts, rounded so that the low parts are what is left of 16 bits.
  static void split_weights(float* weights) {
    Bits high[32 / kLanes], low[32 / kLanes];
    UNROLL for (int i = 0; i < 32 / kLanes; ++i) {
      const Bits rounded = ((Bits)load(weights + i * kLanes) + 0x80) & 0xffffff00u;
      high[i] = rounded & 0xffff0000u;
      low[i] = (Bits)((Vec)rounded - (Vec)high[i]);
    }
    constexpr int kHalf = 16 / kLanes;
    UNROLL for (int i = 0; i < kHalf; ++i) {
      store(weights + i * kLanes, (Vec)(high[i] >> 16 | high[i + kHalf]));
      store(weights + 16 + i * kLanes, (Vec)(low[i] >> 16 | low[i + kHalf]));
    }
  }

  // Values of the columns to tiles, zeros behind.
  template <class Value>
  void interleave(const Value& value, Range columns) const {
    for (int64_t begin = columns.begin; begin < columns.end; begin += kTileInputs) {
      float* const out = values_ + (begin - columns.begin) / kTileInputs * 2 * S_ * kTileWords;
      for (int64_t i = 0; i < kTileRows; ++i) {
        const auto row = [&](int64_t column) -> const bf16* {
          return column < columns.end ? value(column) : nullptr;
        };
        interleave_rows(row(begin + i), row(begin + i + kTileRows), out + i * kTileColumns);
      }
    }
  }

  // Two entries' values to a row of their tiles. None is zeros.
  void interleave_rows(const bf16* first, const bf16* second, float* out) const {
    for (int64_t d = 0; d < S_ * kTileInputs; d += kPair) {
      const Bits a = words_of(first, d), b = words_of(second, d);
      const auto place = [&](int64_t at) {
        return out + at / kTileColumns * kTileWords + at % kTileColumns;
      };
      store(place(d), (Vec)((a & 0xffffu) | b << 16));
      store(place(d + kLanes), (Vec)(a >> 16 | (b & 0xffff0000u)));
    }
  }

  Bits words_of(const bf16* row, int64_t d) const {
    Bits words{};
    const int64_t there = std::min<int64_t>(kPair, D_ - d);
    if (!row || there <= 0) return words;
    if (there == kPair) std::memcpy(&words, row + d, sizeof words);
    else std::memcpy(&words, row + d, size_t(there) * sizeof(bf16));
    return words;
  }

  // Adds the weighted values of the columns, which begin with a tile, or begins with them.
  template <bool kFirst>
  void weigh(const QueryBlocks& blocks, Range columns, const Attended& out) const {
    for (int64_t block = 0; block < blocks.count; ++block) {
      int64_t tile = 0;
      for (; tile + 4 <= 2 * S_; tile += 4) weigh_block<kFirst, 4>(blocks, block, columns, tile, out);
      if (tile < 2 * S_) weigh_block<kFirst, 2>(blocks, block, columns, tile, out);
    }
  }

  // A block of queries and 16 kTogether dimensions.
  template <bool kFirst, int kTogether>
  void weigh_block(const QueryBlocks& blocks, int64_t block, Range columns, int64_t tile,
                   const Attended& out) const {
    Tiles tiles(blocks.shape());
    const int64_t m = blocks.first(block), stride = attended_width(D_);
    float* const sums = out.values + m * stride + tile * kTileColumns;
    each<kTogether>([&](auto sum) INLINE {
      if constexpr (kFirst) tiles.template zero<sum.value>();
      else tiles.template load<sum.value>(sums + sum.value * kTileColumns, stride * 4);
    });
    const float* weights = scores + m * kScoreStride + columns.begin;
    const float* values = values_ + tile * kTileWords;
    for (int64_t begin = columns.begin; begin < columns.end; begin += kTileInputs) {
      tiles.template load<6>(weights, kScoreStride * 4);
      tiles.template load<7>(weights + kTileColumns, kScoreStride * 4);
      each<kTogether>([&](auto sum) INLINE {
        constexpr int there = 4 + sum.value % 2;
        tiles.template load<there>(values + sum.value * kTileWords, kTileRowBytes);
        tiles.template multiply<sum.value, 6, there>();
        tiles.template multiply<sum.value, 7, there>();
      });
      weights += kTileInputs, values += 2 * S_ * kTileWords;
    }
    each<kTogether>([&](auto sum) INLINE {
      tiles.template store<sum.value>(sums + sum.value * kTileColumns, stride * 4);
    });
  }
};

}  // namespace foredraft
