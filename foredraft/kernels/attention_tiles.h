// Scores and weighted values on tiles (amx.h), of keys and values in bfloat16.
//
// Shape legend: see attention.h; S steps of 32 dimensions.
//
// Queries and weights are two bfloat16 parts each, 16 bits of them, as activations are (tiles.h):
// first the high parts are multiplied and added, then the low ones. Scores add up 32 dimensions at a
// time, weighted values 32 ranks at a time, counted from the beginning of the chunk; ranks that a
// token does not see are zeros there. So a query's numbers are the same whatever is computed beside.
//
// Tiles multiply words of two bfloat16 numbers. Of keys these are two dimensions, as they lie in the
// cache; of values the ranks r and r + 16, which spares weights any shuffling: their words are made
// of two vectors that lie behind one another.
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
constexpr int64_t kPanelRanks = 64;  // whose values are laid out together
constexpr int kDimensionTiles = 4;   // tiles of values that are weighed together

// Queries go over tiles in blocks of equally many; the last may have rows that are nobody's.
struct QueryBlocks {
  int64_t begin, count, rows;

  explicit QueryBlocks(int64_t queries)
      : begin(0),
        count((queries + kTileRows - 1) / kTileRows),
        rows((queries + count - 1) / count) {}

  // Blocks that have nobody's rows in none.
  static QueryBlocks exactly(Range queries) {
    const int64_t size = queries.end - queries.begin;
    QueryBlocks blocks(size);
    while (size % blocks.rows) --blocks.rows;
    blocks.begin = queries.begin, blocks.count = size / blocks.rows;
    return blocks;
  }

  int64_t size() const { return count * rows; }
  int64_t first(int64_t block) const { return begin + block * rows; }
  // Tiles 0 to 3 are sums, 4 and 5 keys or values, 6 and 7 queries or weights.
  TileShape shape() const {
    const uint8_t count = uint8_t(rows);
    return {{count, count, count, count, kTileRows, kTileRows, count, count}};
  }
};

// The arithmetic of attention.h. While tiles multiply, vectors lay out what comes next.
class TileAttention {
 public:
  static constexpr int64_t kScored = kRunEntries;
  static constexpr int64_t kWeighed = kTileInputs;
  static constexpr bool kHasWindows = false;  // nor caps: see with_form()
  static_assert(kScored == 2 * kTileColumns && kChunk % kPanelRanks == 0, "whole tiles");

  float* queries;  // [M, padded D], scaled
  float* scores;   // [M, kScoreStride], then weights: for 32 ranks 16 words of high parts, 16 of low

  static int64_t size(int64_t M, int64_t D) {
    const int64_t entries = 2 * kScored + 2 * kPanelRanks;
    const int64_t tiles = entries / kTileColumns * steps(D) + 1;  // and room for alignment
    const int64_t rows = attended_rows(M);
    return M * padded(D) + rows * (kScoreStride + steps(D) * kTileInputs) + tiles * kTileWords;
  }

  TileAttention(float* memory, int64_t M, int64_t D)
      : queries(memory), M_(M), D_(D), S_(steps(D)), blocks_(M) {
    const auto aligned = (uintptr_t(memory + M * padded(D)) + kTileRowBytes - 1) / kTileRowBytes;
    scores = reinterpret_cast<float*>(aligned * kTileRowBytes);
    parts_ = reinterpret_cast<char*>(scores + blocks_.size() * kScoreStride);
    keys_ = reinterpret_cast<float*>(parts_ + S_ * 2 * part_bytes());
    values_ = keys_ + 2 * step_words();
  }

  // Takes over the queries, and the thread's tiles.
  void begin() const {
    whole();
    if (D_ % kTileInputs) std::fill(keys_, values_, 0.0f);  // behind the last dimension
    for (int64_t m = 0; m < M_; ++m)
      for (int64_t s = 0; s < S_; ++s) {
        alignas(64) float row[kTileInputs] = {};
        const int64_t d = s * kTileInputs;
        std::copy_n(queries + m * padded(D_) + d, std::min(kTileInputs, D_ - d), row);
        put_parts<float>(row, kTileInputs, parts_ + 2 * s * part_bytes() + m * kTileRowBytes,
                         part_bytes());
      }
  }

  // How often between() is called for so many ranks that are scored, and weighed for all queries.
  int64_t num_pauses(int64_t scored, int64_t weighed) const {
    return ceil_div(scored, kScored) * S_ + M_ +
           ceil_div(weighed, kWeighed) * blocks_.count * ceil_div(2 * S_, kDimensionTiles);
  }

  template <class Between>
  void score(const Entries<const bf16>& keys, Range range, int64_t column,
             const Between& between) const {
    for (int64_t s = 0; s < S_; ++s) transpose(keys, range, s, keys_);
    for (int64_t i = 0; range.begin < range.end; ++i, column += kScored) {
      range.begin += kScored;
      const float* const here = keys_ + i % 2 * step_words();
      float* const there = keys_ + (i + 1) % 2 * step_words();
      const auto meanwhile = [&](int64_t s) INLINE { transpose(keys, range, s, there), between(); };
      const auto nothing = [](int64_t) {};
      for (int64_t block = 0; block < blocks_.count; block += 2)
        if (block + 1 == blocks_.count && block) score_blocks<1>(block, here, column, nothing);
        else if (block + 1 == blocks_.count) score_blocks<1>(block, here, column, meanwhile);
        else if (block) score_blocks<2>(block, here, column, nothing);
        else score_blocks<2>(block, here, column, meanwhile);
    }
  }

  // Ranks from `count` to `end`, which others see, get no weight.
  void weights_of(int64_t m, Range ranks, int64_t end, float, const Attended& out) const {
    const int64_t count = ranks.end;
    float* const row = scores + m * kScoreStride;
    for (int64_t i = count; i % kTileInputs; ++i) row[i] = -INFINITY;
    const float most = out.most[m] = largest_score(row, count);
    Vec total{};
    int64_t i = 0;
    for (; i + kTileInputs <= count; i += kTileInputs) split_weights<true>(row + i, 32, most, total);
    if (i < count) split_weights<false>(row + i, count - i, most, total), i += kTileInputs;
    for (; i < end; i += kTileInputs) std::fill(row + i, row + i + kTileInputs, 0.0f);
    out.sum[m] = sum_lanes(total);
  }

  void clear(const Attended&) const {}  // weigh_shared() does so

  // Where a query has no weight a value must not matter: one that is not finite would.
  template <class Between>
  int64_t weigh_shared(const Entries<const bf16>& values, Range range, int64_t, int64_t common,
                       const Attended& out, const Between& between) const {
    for (int64_t entry = range.begin + common; entry < range.end; ++entry)
      if (!is_finite(values.at(entry))) range.end = range.begin + common / kWeighed * kWeighed;
    const Range columns{0, range.end - range.begin};
    if (columns.end == 0) std::fill(out.values, out.values + M_ * attended_width(D_), 0.0f);
    const auto value = [&](int64_t column) { return values.at(range.begin + column); };
    const auto put = [&](int64_t column, float* tiles) {
      if (column + kTileInputs <= columns.end && D_ % kPair == 0)
        interleave_run(value(column), tiles);
      else interleave(value, {column, columns.end}, tiles);
    };
    weigh(blocks_, columns, out, put, between);
    return columns.end;
  }

  // For what follows the thread's tiles take these queries alone, and all of them again.
  void part(int64_t count) const { TileSession::shape(QueryBlocks::exactly({0, count}).shape()); }
  void whole() const { TileSession::shape(blocks_.shape()); }

  template <class Value>
  void weigh_rest(const Value& value, Range columns, Range queries, const Attended& out) const {
    const auto put = [&](int64_t column, float* tiles) {
      interleave(value, {column, columns.end}, tiles);
    };
    weigh(QueryBlocks::exactly(queries), columns, out, put, [] {});
  }

 private:
  const int64_t M_, D_, S_;
  const QueryBlocks blocks_;
  char* parts_;    // of queries [S, high and low, M, 32 dimensions]
  float* keys_;    // words [2, 16 entries and 16 more, S, 16 pairs of dimensions, 16 entries]
  float* values_;  // words [2, panel, 2 S, 16 pairs of ranks, 16 dimensions in lane order]

  static int64_t steps(int64_t D) { return (D + kTileInputs - 1) / kTileInputs; }

  int64_t part_bytes() const { return blocks_.size() * kTileRowBytes; }
  // Of 32 entries, keys or values.
  int64_t step_words() const { return 2 * S_ * kTileWords; }
  // Where the values of 32 columns are laid out: there is room for two panels.
  float* values_of(int64_t column) const {
    return values_ + column % (2 * kPanelRanks) / kTileInputs * step_words();
  }

  // 32 dimensions of the first 32 keys of the range.
  void transpose(const Entries<const bf16>& keys, Range range, int64_t s, float* out) const {
    if (range.begin >= range.end) return;
    const int64_t d = s * kTileInputs;
    // Entries behind the last one are nobody's, and as near: whole vectors are faster.
    transpose_keys(keys.at(range.begin) + d, D_, std::min(kTileInputs, D_ - d), kScored, kScored,
                   [&](Ints words, int64_t word, int64_t first) INLINE {
      float* const tile = out + (first / kTileColumns * S_ + s) * kTileWords;
      store(tile + word * kTileColumns + first % kTileColumns, (Vec)words);
    });
  }

  template <int kBlocks, class Meanwhile>
  void score_blocks(int64_t block, const float* keys, int64_t column,
                    const Meanwhile& meanwhile) const {
    Tiles tiles(blocks_.shape());
    each<2 * kBlocks>([&](auto sum) INLINE { tiles.template zero<sum.value>(); });
    const int64_t first = blocks_.first(block), rows = blocks_.rows;
    for (int64_t s = 0; s < S_; ++s) {
      tiles.template load<4>(keys + s * kTileWords, kTileRowBytes);
      tiles.template load<5>(keys + (S_ + s) * kTileWords, kTileRowBytes);
      each<kBlocks>([&](auto b) INLINE {
        const char* const high =
            parts_ + 2 * s * part_bytes() + (first + b.value * rows) * kTileRowBytes;
        tiles.template load<6>(high, kTileRowBytes);
        tiles.template load<7>(high + part_bytes(), kTileRowBytes);
        tiles.template multiply<2 * b.value, 6, 4>();
        tiles.template multiply<2 * b.value + 1, 6, 5>();
        tiles.template multiply<2 * b.value, 7, 4>();
        tiles.template multiply<2 * b.value + 1, 7, 5>();
      });
      meanwhile(s);
    }
    each<2 * kBlocks>([&](auto sum) INLINE {
      float* const out = scores + (first + sum.value / 2 * rows) * kScoreStride + column;
      tiles.template store<sum.value>(out + sum.value % 2 * kTileColumns, kScoreStride * 4);
    });
  }

  // 32 scores to weights, as 16 words of high parts and 16 of low ones: rounded to 16 bits, such
  // that the low parts are what is left of these. All scores are there, or `count` of them.
  template <bool kAll>
  static void split_weights(float* row, int64_t count, float most, Vec& total) {
    Bits high[32 / kLanes], low[32 / kLanes];
    UNROLL for (int i = 0; i < 32 / kLanes; ++i) {
      Vec weight = exp2_of_negative(load(row + i * kLanes) - broadcast(most));
      if (!kAll) weight = lane_numbers() < int32_t(count - i * kLanes) ? weight : Vec{};
      total += weight;
      const Bits rounded = ((Bits)weight + 0x80) & 0xffffff00u;
      high[i] = rounded & 0xffff0000u;
      low[i] = (Bits)((Vec)rounded - (Vec)high[i]);
    }
    constexpr int kHalf = 16 / kLanes;
    UNROLL for (int i = 0; i < kHalf; ++i) {
      store(row + i * kLanes, (Vec)(high[i] >> 16 | high[i + kHalf]));
      store(row + 16 + i * kLanes, (Vec)(low[i] >> 16 | low[i + kHalf]));
    }
  }

  bool is_finite(const bf16* value) const {
    return std::all_of(value, value + D_, [](bf16 x) { return (x.bits & 0x7f80) != 0x7f80; });
  }

  // The first 32 of these columns' values to tiles, zeros behind.
  template <class Value>
  void interleave(const Value& value, Range columns, float* out) const {
    for (int64_t i = 0; i < kTileRows; ++i) {
      const auto row = [&](int64_t column) -> const bf16* {
        return column < columns.end ? value(column) : nullptr;
      };
      const bf16* const first = row(columns.begin + i);
      const bf16* const second = row(columns.begin + i + kTileRows);
      for (int64_t d = 0; d < S_ * kTileInputs; d += kPair)
        put_values(words_of(first, d), words_of(second, d), d, out + i * kTileColumns);
    }
  }

  // The same of entries that lie behind one another, and of whole vectors.
  void interleave_run(const bf16* values, float* out) const {
    for (int64_t i = 0; i < kTileRows; ++i, values += D_, out += kTileColumns)
      for (int64_t d = 0; d < D_; d += kPair) {
        Bits first, second;
        std::memcpy(&first, values + d, sizeof first);
        std::memcpy(&second, values + kTileRows * D_ + d, sizeof second);
        put_values(first, second, d, out);
      }
  }

  // kPair dimensions of two entries to a row of their tiles.
  static void put_values(Bits first, Bits second, int64_t d, float* out) {
    const auto place = [&](int64_t at) {
      return out + at / kTileColumns * kTileWords + at % kTileColumns;
    };
    store(place(d), (Vec)((first & 0xffffu) | second << 16));
    store(place(d + kLanes), (Vec)(first >> 16 | (second & 0xffff0000u)));
  }

  Bits words_of(const bf16* row, int64_t d) const {
    Bits words{};
    const int64_t there = std::min<int64_t>(kPair, D_ - d);
    if (!row || there <= 0) return words;
    if (there == kPair) std::memcpy(&words, row + d, sizeof words);
    else std::memcpy(&words, row + d, size_t(there) * sizeof(bf16));
    return words;
  }

  // Adds the weighted values of the columns to what there is of those before; the chunk's first begin
  // with zeros. put(column, tiles) lays 32 of them out.
  template <class Put, class Between>
  void weigh(const QueryBlocks& blocks, Range columns, const Attended& out, const Put& put,
             const Between& between) const {
    const auto lay_out = [&](int64_t column) {
      if (column < columns.end) put(column, values_of(column));
    };
    const auto meanwhile = [&](int64_t column) INLINE { lay_out(column + kPanelRanks), between(); };
    const auto nothing = [&](int64_t) INLINE { between(); };
    for (int64_t i = 0; i < kPanelRanks; i += kTileInputs) lay_out(columns.begin + i);
    for (int64_t begin = columns.begin; begin < columns.end; begin += kPanelRanks) {
      const Range panel{begin, std::min(begin + kPanelRanks, columns.end)};
      for (int64_t block = 0; block < blocks.count; ++block)
        for (int64_t tile = 0; tile < 2 * S_; tile += kDimensionTiles)
          if (block || tile) weigh_block(blocks, block, panel, tile, out, nothing);
          else weigh_block(blocks, block, panel, tile, out, meanwhile);
    }
  }

  template <class Meanwhile>
  void weigh_block(const QueryBlocks& blocks, int64_t block, Range columns, int64_t tile,
                   const Attended& out, const Meanwhile& meanwhile) const {
    if (tile + kDimensionTiles <= 2 * S_)
      weigh_tiles<kDimensionTiles>(blocks, block, columns, tile, out, meanwhile);
    else weigh_tiles<2>(blocks, block, columns, tile, out, meanwhile);
  }

  // A block of queries and 16 kTogether dimensions.
  template <int kTogether, class Meanwhile>
  void weigh_tiles(const QueryBlocks& blocks, int64_t block, Range columns, int64_t tile,
                   const Attended& out, const Meanwhile& meanwhile) const {
    Tiles tiles(blocks.shape());
    const int64_t m = blocks.first(block), stride = attended_width(D_);
    float* const sums = out.values + m * stride + tile * kTileColumns;
    each<kTogether>([&](auto sum) INLINE {
      if (columns.begin) tiles.template load<sum.value>(sums + sum.value * kTileColumns, stride * 4);
      else tiles.template zero<sum.value>();
    });
    for (int64_t column = columns.begin; column < columns.end; column += kTileInputs) {
      const float* const weights = scores + m * kScoreStride + column;
      const float* const values = values_of(column) + tile * kTileWords;
      tiles.template load<6>(weights, kScoreStride * 4);
      tiles.template load<7>(weights + kTileColumns, kScoreStride * 4);
      each<kTogether / 2>([&](auto pair) INLINE {
        constexpr int first = 2 * pair.value, second = first + 1;
        tiles.template load<4>(values + first * kTileWords, kTileRowBytes);
        tiles.template load<5>(values + second * kTileWords, kTileRowBytes);
        tiles.template multiply<first, 6, 4>();
        tiles.template multiply<second, 6, 5>();
        tiles.template multiply<first, 7, 4>();
        tiles.template multiply<second, 7, 5>();
      });
      meanwhile(column);
    }
    each<kTogether>([&](auto sum) INLINE {
      tiles.template store<sum.value>(sums + sum.value * kTileColumns, stride * 4);
    });
  }
};

}  // namespace foredraft
