// Products of weights in 8 and 4 bits on tiles (amx.h), where several tokens make that worth while.
//
// Shape legend: T tokens of a pass, G groups of rows.
//
// A token's two digits (dots.h) are two rows of a tile, so one instruction multiplies the block of 32
// inputs of 8 tokens with 16 weight rows. Its integer sums are exact, so what comes out has the bits
// that int8.h gives any other way. They must leave the tiles for each block, to be multiplied with its
// scale: while the tiles multiply one block, vectors add up the one before.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "amx.h"
#include "each.h"
#include "int8.h"

namespace foredraft {

constexpr int64_t kFewestTileTokens = 4;  // below vectors are as fast
constexpr int64_t kMostPassTokens = kTileRows / 2;
constexpr int64_t kDigitRow = kChunkInputs;  // bytes from one row of digits to the next

inline bool goes_on_tiles(int64_t num_tokens) {
  return kTiles && num_tokens >= kFewestTileTokens && tiles_allowed();
}

// Passes over the weights are of equally many tokens: the last begins early enough for that.
struct DigitPasses {
  int64_t count, tokens;

  explicit DigitPasses(int64_t num_tokens)
      : count((num_tokens + kMostPassTokens - 1) / kMostPassTokens),
        tokens(count ? (num_tokens + count - 1) / count : 0) {}
};

// Tiles 0 to 3 are sums, 4 and 5 weights of a block, 6 its activations.
inline TileShape digit_tile_shape(int64_t num_tokens) {
  const uint8_t digits = uint8_t(2 * std::max<int64_t>(1, DigitPasses(num_tokens).tokens));
  constexpr uint8_t kQuads = kScaleInputs / kQuad, kInputs = kScaleInputs;
  return {{digits, digits, digits, digits, kQuads, kQuads, digits, digits},
          {64, 64, 64, 64, 64, 64, kInputs, kInputs}};
}

// values[(t * G + g) * kGroupRows + r] as of `group_product`, for T tokens.
template <class Format, int G, int T>
__attribute__((noinline)) void tile_group_product(const uint8_t* group, int64_t group_bytes,
                                                  const PackedInputs<Format>& inputs,
                                                  int64_t first_token, int64_t ahead, float* values) {
  constexpr int V = G * kGroupVecs, kLine = 64;
  constexpr int64_t kBlockBytes = (Format::kChunkBytes - Format::kHeadBytes) / 2;
  struct alignas(64) Sums {
    int32_t digits[G][T][2][kGroupRows];
  };
  Sums sums[2];
  alignas(64) uint8_t columns[2][G][kScaleInputs * kGroupRows];
  Tiles tiles(digit_tile_shape(inputs.num_tokens));
  Vec total[V][T];
  UNROLL for (int v = 0; v < V; ++v) UNROLL for (int t = 0; t < T; ++t) total[v][t] = Vec{};
  const int64_t num_tokens = inputs.num_tokens, chunks = weight_chunks(inputs.K);
  const int8_t* x = inputs.data + first_token * kTokenBytes;
  const int32_t* kept = inputs.kept + first_token;

  const auto words = [&](auto block, auto g, const uint8_t* chunk) INLINE {
    return chunk + g.value * group_bytes + Format::kHeadBytes + block.value * kBlockBytes;
  };
  const auto unpack = [&](auto block, const uint8_t* chunk) INLINE {
    if constexpr (Format::kUnpacks)
      each<G>([&](auto g) INLINE { Format::unpack(words(block, g, chunk), columns[block.value][g.value]); });
  };
  // Sums are stored one block after they were multiplied: right behind it, that waits twice as long.
  const auto store_sums = [&](auto block, auto g) INLINE {
    tiles.template store<block.value * 2 + g.value>(sums[block.value].digits[g.value], kTileRowBytes);
  };
  const auto multiply = [&](auto block, const uint8_t* chunk, const int8_t* digits, auto stores) INLINE {
    constexpr int kBlock = block.value;
    tiles.template load<6 + kBlock>(digits + kBlock * kScaleInputs, kDigitRow);
    each<G>([&](auto g) INLINE {
      constexpr int kSums = kBlock * 2 + g.value, kWeights = 4 + g.value % 2;
      const uint8_t* const source = words(block, g, chunk);
      const uint8_t* next = source + ahead;
      keep_in_register(next);  // or each line gets a register of its own
      UNROLL for (int64_t i = 0; i < kBlockBytes; i += kLine)
        __builtin_prefetch(next + i, 0, kToL2);
      tiles.template load<kWeights>(Format::kUnpacks ? columns[kBlock][g.value] : source, kTileRowBytes);
      tiles.template zero<kSums>();
      tiles.template multiply_bytes<kSums, 6 + kBlock, kWeights>();
      if constexpr (stores.value) store_sums(std::integral_constant<int, 1 - kBlock>{}, g);
    });
  };
  const auto add = [&](auto block, const uint8_t* chunk, const int32_t* kept) INLINE {
    constexpr int kBlock = block.value;
    UNROLL for (int v = 0; v < V; ++v) {
      const int g = v / kGroupVecs, lane = v % kGroupVecs * kLanes;
      const uint8_t* const scale_at =
          chunk + g * group_bytes + kBlock * kScalesBytes / 2 + lane * sizeof(uint16_t);
      const Vec scale = load_halves(scale_at);
      UNROLL for (int t = 0; t < T; ++t) {
        const Ints sum = (load_ints(&sums[kBlock].digits[g][t][0][lane]) << 8) +
                         load_ints(&sums[kBlock].digits[g][t][1][lane]) + Format::start(kept + t);
        total[v][t] = fma(__builtin_convertvector(sum, Vec), scale, total[v][t]);
      }
      if constexpr (Format::kHasMinima) {
        const Vec minimum = load_halves(scale_at + kScalesBytes);
        UNROLL for (int t = 0; t < T; ++t)
          total[v][t] = fma((Vec)repeat(kept + t), minimum, total[v][t]);
      }
    }
  };

  constexpr std::integral_constant<int, 0> first;
  constexpr std::integral_constant<int, 1> second;
  unpack(first, group);
  unpack(second, group);
  multiply(first, group, x, std::false_type{});
  if (chunks > 1) unpack(first, group + Format::kChunkBytes);
  multiply(second, group, x, std::true_type{});
  for (int64_t chunk = 1; chunk < chunks; ++chunk) {
    const uint8_t* const before = group;
    group += Format::kChunkBytes, x += num_tokens * kTokenBytes;
    UNROLL for (int g = 0; g < G; ++g)
      UNROLL for (int64_t i = 0; i < Format::kHeadBytes; i += kLine)
        __builtin_prefetch(before + g * group_bytes + ahead + i, 0, kToL2);
    unpack(second, group);
    multiply(first, group, x, std::true_type{});
    add(first, before, kept);
    if (chunk + 1 < chunks) unpack(first, group + Format::kChunkBytes);
    multiply(second, group, x, std::true_type{});
    add(second, before, kept + num_tokens);
    kept += 2 * num_tokens;
  }
  each<G>([&](auto g) INLINE { store_sums(second, g); });
  add(first, group, kept);
  add(second, group, kept + num_tokens);
  UNROLL for (int t = 0; t < T; ++t)
    UNROLL for (int v = 0; v < V; ++v) store(values + (t * V + v) * kLanes, total[v][t]);
}

template <int G, class Format>
inline void tile_groups(const PackedMatrix<Format>& weights, int64_t row,
                        const PackedInputs<Format>& x, int64_t first, int64_t tokens, int64_t ahead,
                        float* values) {
  const auto product = [&](auto count) {
    tile_group_product<Format, G, decltype(count)::value>(
        weights.group(row), weights.group_bytes(), x, first, ahead, values);
  };
  switch (tokens) {
    case 4: return product(std::integral_constant<int, 4>{});
    case 5: return product(std::integral_constant<int, 5>{});
    case 6: return product(std::integral_constant<int, 6>{});
    case 7: return product(std::integral_constant<int, 7>{});
    default: return product(std::integral_constant<int, 8>{});
  }
}

template <class Format, class Put>
inline void all_tokens_on_tiles(const PackedMatrix<Format>& weights, Range rows,
                                const PackedInputs<Format>& x, int64_t num_tokens,
                                const void* ahead, const Put& put) {
  const DigitPasses passes(num_tokens);
  const int64_t bytes_ahead = static_cast<const uint8_t*>(ahead) - weights.group(rows.begin);
  int64_t row = rows.begin;
  const auto in_blocks = [&](auto groups) {
    constexpr int G = decltype(groups)::value;
    constexpr int64_t kRows = G * kGroupRows;
    alignas(64) float values[kRows * kMostPassTokens];
    for (; rows.end - row > kRows - kGroupRows; row += kRows)
      for (int64_t first = 0; first < num_tokens; first += passes.tokens) {
        const int64_t from = std::min(first, num_tokens - passes.tokens);
        tile_groups<G>(weights, row, x, from, passes.tokens, bytes_ahead, values);
        put_block<G>(values, from, {first, std::min(first + passes.tokens, num_tokens)}, x.scales, row,
                     std::min(kRows, rows.end - row), put);
      }
  };
  in_blocks(std::integral_constant<int, 2>{});
  in_blocks(std::integral_constant<int, 1>{});
}

// Weight rows `rows`, which begin with a group, against all tokens. As many bytes at `ahead` are
// prefetched meanwhile.
template <class Format, class Put>
inline void all_tokens(const PackedMatrix<Format>& weights, Range rows, const PackedInputs<Format>& x,
                       int64_t num_tokens, const void* ahead, const Put& put) {
  if (!num_tokens) return;
  if (goes_on_tiles(num_tokens)) all_tokens_on_tiles(weights, rows, x, num_tokens, ahead, put);
  else all_tokens_in_vectors(weights, rows, x, num_tokens, ahead, put);
}

template <class Format>
inline int64_t panel_rows(const PackedMatrix<Format>&, int64_t) {
  return kMostGroups * kGroupRows;
}

}  // namespace foredraft
