// Products of bfloat16 weights with activations in two bfloat16 parts, on tiles (amx.h).
//
// Shape legend: T tokens (activation rows), K inputs of a product.
//
// An activation is the sum of a bfloat16 and of another that holds what the first left over: 16 bits
// of it count. Of each 32 inputs first the high parts are multiplied and added, then the low ones. So
// an output element is one sum in one order whatever is computed beside it, as matmul.h promises for
// other products; single tokens go the same way.
//
// Weights are packed in groups of rows (groups.h): of 16 rows and 32 inputs a tile
//   [16 pairs of inputs, 16 rows, 2 inputs],
// which is a kilobyte in one piece. Tiles of rows that lie far apart, as in a checkpoint, load more
// slowly than memory gives them. Activations are laid out as
//   [blocks of tokens, steps of 32 inputs, high and low, tokens of a block, 32 inputs].
#pragma once

#include <algorithm>
#include <cstdint>

#include "amx.h"
#include "each.h"
#include "groups.h"
#include "matmul.h"
#include "simd.h"
#include "team.h"

namespace foredraft {

constexpr int64_t kMostTileTokens = kTileRows;
constexpr int64_t kTileInputs = 32;
constexpr int64_t kStreamTokens = 8;  // up to here fewer groups at a time: memory gives these faster

// A chunk is two tiles.
struct Bits16 {
  static constexpr int64_t kChunkBytes = 2 * kTileBytes;
};

using TileMatrix = GroupedMatrix<Bits16>;

// Tokens go over weights in passes of one block, or two with more than 16 tokens. Blocks are equally
// high, for a tile costs by its rows: 40 tokens are four blocks of 10.
struct TokenBlocks {
  int64_t passes, per_pass, tokens;  // of a block

  explicit TokenBlocks(int64_t num_tokens)
      : passes((num_tokens + 2 * kMostTileTokens - 1) / (2 * kMostTileTokens)),
        per_pass(num_tokens > kMostTileTokens ? 2 : 1),
        tokens(std::max<int64_t>(1, passes ? (num_tokens + passes * per_pass - 1) / (passes * per_pass) : 0)) {}

  int64_t count() const { return passes * per_pass; }
};

// Tiles 0 to 3 are sums, 4 and 5 weights, 6 and 7 activations.
inline TileShape tile_shape(int64_t num_tokens) {
  const uint8_t tokens = uint8_t(TokenBlocks(num_tokens).tokens);
  return {{tokens, tokens, tokens, tokens, kTileRows, kTileRows, tokens, tokens}};
}

// The nearest bfloat16 of each lane, as the upper half of a word, the lower half zero.
inline Bits to_bf16(Vec x) {
  const Bits word = (Bits)x;
  const Bits rounded = (word + 0x7fff + ((word >> 16) & 1)) & 0xffff0000;
  return x == x ? rounded : (word | 0x400000) & 0xffff0000;
}

// Every second one of kPair floats in the lane order of a type.
inline Vec every_second(const float* x, int first, const bf16*) { return load(x + first * kLanes); }

inline Vec every_second(const float* x, int first, const float*) {
  float pair[kPair];
  store_in_lane_order(pair, load(x), load(x + kLanes), static_cast<const bf16*>(nullptr));
  return load(pair + first * kLanes);
}

// Both parts of 32 floats, of which `count` are there, whole pairs: a tile's row each.
template <class Weight>
inline void put_parts(const float* x, int64_t count, char* high_row, int64_t part_bytes) {
  constexpr const Weight* kOrder = nullptr;  // names the type
  for (int64_t i = 0; i < kTileInputs; i += kPair) {
    const bool there = i < count;
    const Vec even = there ? every_second(x + i, 0, kOrder) : Vec{};
    const Vec odd = there ? every_second(x + i, 1, kOrder) : Vec{};
    const Bits high_even = to_bf16(even), high_odd = to_bf16(odd);
    const Bits high = high_odd | (high_even >> 16);
    const Bits low = to_bf16(odd - (Vec)high_odd) | (to_bf16(even - (Vec)high_even) >> 16);
    std::memcpy(high_row + i * sizeof(bf16), &high, sizeof high);
    std::memcpy(high_row + part_bytes + i * sizeof(bf16), &low, sizeof low);
  }
}

struct TileInputs {
  char* data;
  int64_t num_tokens, K;
  TokenBlocks blocks;

  static int64_t num_steps(int64_t K) { return weight_chunks(K) * (kChunkInputs / kTileInputs); }

  // Floats of memory, room for alignment included.
  static int64_t size(int64_t num_tokens, int64_t K) {
    const TokenBlocks blocks(num_tokens);
    return blocks.count() * blocks.tokens * num_steps(K) * kTileInputs + 16;
  }

  TileInputs(float* memory, int64_t num_tokens, int64_t K)
      : data(reinterpret_cast<char*>((uintptr_t(memory) + 63) / 64 * 64)),
        num_tokens(num_tokens),
        K(K),
        blocks(num_tokens) {}

  // Of a block of tokens: the high parts (0) or the low ones (1).
  char* tile(int64_t block, int64_t step, int64_t part) const {
    return data + ((block * num_steps(K) + step) * 2 + part) * part_bytes();
  }

  int64_t part_bytes() const { return blocks.tokens * kTileRowBytes; }

  char* row(int64_t token, int64_t step, int64_t part) const {
    return tile(token / blocks.tokens, step, part) + token % blocks.tokens * kTileRowBytes;
  }

  // Of `count` of the tokens, number i that of token_of(i), in memory of their own.
  template <class TokenOf>
  TileInputs gathered(float* memory, int64_t count, const TokenOf& token_of) const {
    const TileInputs some(memory, count, K);
    for (int64_t i = 0; i < count; ++i)
      for (int64_t step = 0; step < num_steps(K); ++step)
        for (int64_t part = 0; part < 2; ++part)
          std::memcpy(some.row(i, step, part), row(token_of(i), step, part), kTileRowBytes);
    return some;
  }

  // Takes over rows of K floats that lie in the lane order of `Weight`, zeros behind.
  template <class Weight>
  void prepare(const float* rows, Range tokens) const {
    for (int64_t t = tokens.begin; t < tokens.end; ++t)
      for (int64_t step = 0; step < num_steps(K); ++step)
        put_parts<Weight>(rows + t * padded(K) + step * kTileInputs, padded(K) - step * kTileInputs,
                          row(t, step, 0), part_bytes());
  }
};

// sums[b * 16 + t][g * 16 + r]: row r of group g, token t of block b of the pass. As many bytes at
// `ahead` are pulled towards the core meanwhile, at the pace of loads: in bursts that takes a
// twentieth longer.
template <int kGroups, int kBlocks>
inline void tile_product(const uint8_t* groups, int64_t group_bytes, const TileInputs& x,
                         int64_t pass, const uint8_t* ahead, float* sums) {
  static_assert(kGroups * kBlocks <= 4, "");
  Tiles tiles(tile_shape(x.num_tokens));
  each<kGroups * kBlocks>([&](auto sum) INLINE { tiles.template zero<sum.value>(); });
  const auto load_weights = [&](auto tile, const uint8_t* source, const uint8_t* next) INLINE {
    keep_in_register(next);  // or each line gets a register of its own
    UNROLL for (int64_t line = 0; line < kTileBytes; line += kTileRowBytes)
      __builtin_prefetch(next + line, 0, kToL2);
    tiles.template load<tile.value>(source, kTileRowBytes);
  };
  const int64_t steps = TileInputs::num_steps(x.K), part_bytes = x.part_bytes();
  const char* first = x.tile(pass * kBlocks, 0, 0);
  const char* second = first + steps * 2 * part_bytes;  // of two blocks
  for (int64_t step = 0; step < steps; ++step) {
    if constexpr (kBlocks == 1) {  // both parts of the block stay while group after group comes
      tiles.template load<6>(first, kTileRowBytes);
      tiles.template load<7>(first + part_bytes, kTileRowBytes);
      each<kGroups>([&](auto g) INLINE {
        constexpr std::integral_constant<int, 4 + g.value % 2> weights;
        load_weights(weights, groups + g.value * group_bytes, ahead + g.value * group_bytes);
        tiles.template multiply<g.value, 6, weights.value>();
        tiles.template multiply<g.value, 7, weights.value>();
      });
    } else {  // the groups stay while part after part comes
      each<kGroups>([&](auto g) INLINE {
        load_weights(std::integral_constant<int, 4 + g.value>{}, groups + g.value * group_bytes,
                     ahead + g.value * group_bytes);
      });
      UNROLL for (int part = 0; part < 2; ++part) {
        tiles.template load<6>(first + part * part_bytes, kTileRowBytes);
        tiles.template load<7>(second + part * part_bytes, kTileRowBytes);
        each<kGroups>([&](auto g) INLINE {
          tiles.template multiply<2 * g.value, 6, 4 + g.value>();
          tiles.template multiply<2 * g.value + 1, 7, 4 + g.value>();
        });
      }
    }
    groups += kTileBytes, ahead += kTileBytes;
    first += 2 * part_bytes, second += 2 * part_bytes;
  }
  each<kGroups * kBlocks>([&](auto sum) INLINE {
    constexpr int g = sum.value / kBlocks, block = sum.value % kBlocks;
    tiles.template store<sum.value>(sums + (block * kTileRows * kGroups + g) * kGroupRows,
                                    kGroups * kTileRowBytes);
  });
}

// With several passes what one product takes, so that the passes find it in the nearest cache; else a
// few products.
inline int64_t panel_rows(const TileMatrix&, int64_t num_tokens) {
  return (TokenBlocks(num_tokens).passes > 1 ? 2 : 8) * kGroupRows;
}

// So many groups from `row` against one pass of tokens.
template <int kGroups, int kBlocks, class Put>
inline void tile_groups(const TileMatrix& weights, Range rows,
                        const TileInputs& x, int64_t pass, const uint8_t* ahead, const Put& put) {
  alignas(64) float sums[kGroups * kBlocks * kTileRows * kGroupRows];
  tile_product<kGroups, kBlocks>(weights.group(rows.begin), weights.group_bytes(), x, pass, ahead,
                                 sums);
  constexpr int64_t kRows = kGroups * kGroupRows;
  const int64_t first = pass * kBlocks * x.blocks.tokens;
  const int64_t count = std::min(kBlocks * x.blocks.tokens, x.num_tokens - first);
  for (int64_t t = 0; t < count; ++t) {
    const int64_t place = t < x.blocks.tokens ? t : t - x.blocks.tokens + kTileRows;
    const float* const found = sums + place * kRows;
    const auto put_row = [&](int64_t r) INLINE { put(first + t, rows.begin + r, found[r]); };
    if (rows.end - rows.begin == kRows) {  // a loop that becomes a few vectors
      _Pragma("GCC ivdep") for (int64_t r = 0; r < kRows; ++r) put_row(r);
    } else {
      for (int64_t r = 0; r < rows.end - rows.begin; ++r) put_row(r);
    }
  }
}

// Weight rows `rows`, which begin with a group, against all tokens. Meanwhile what is at `ahead` is
// prefetched: as many bytes, or with one pass of tokens only as many as the first product reads.
template <class Put>
inline void all_tokens(const TileMatrix& weights, Range rows, const TileInputs& x,
                       int64_t num_tokens, const void* ahead, const Put& put) {
  if (!num_tokens) return;
  const uint8_t* const there = static_cast<const uint8_t*>(ahead);
  const auto ahead_of = [&](int64_t row, int64_t end, int64_t pass) INLINE {
    if (x.blocks.passes == 1) return end < rows.end ? weights.group(end) : there;
    return pass ? weights.group(row) : there + (weights.group(row) - weights.group(rows.begin));
  };
  int64_t row;
  const auto products = [&](auto num_groups, auto blocks, int64_t pass) INLINE {
    constexpr int64_t kGroups = decltype(num_groups)::value, kRows = kGroups * kGroupRows;
    for (; rows.end - row > kRows - kGroupRows; row += kRows) {
      const int64_t end = std::min(row + kRows, rows.end);
      tile_groups<kGroups, decltype(blocks)::value>(weights, {row, end}, x, pass,
                                                    ahead_of(row, end, pass), put);
    }
  };
  constexpr std::integral_constant<int, 1> one;
  constexpr std::integral_constant<int, 2> two;
  constexpr std::integral_constant<int, 4> four;
  for (int64_t pass = 0; pass < x.blocks.passes; ++pass) {
    row = rows.begin;
    if (x.blocks.per_pass == 1) {
      if (num_tokens > kStreamTokens) products(four, one, pass);
      products(two, one, pass);
      products(one, one, pass);
    } else {
      products(two, two, pass);
      products(one, two, pass);
    }
  }
}

}  // namespace foredraft
