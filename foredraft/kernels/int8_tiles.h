// Products of weights in few bits on tiles (amx.h), where several tokens make that worth while.
//
// Shape legend: T tokens of a pass, G groups of rows.
//
// A token's two digits (dots.h) are two rows of a tile, so one instruction multiplies the block of 32
// inputs of 8 tokens with 16 weight rows; of activations of 8 bits each token has one row. Its integer sums are exact, so what comes out has the bits
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

constexpr int kFewestTileTokens = 4;  // below vectors are as fast
constexpr int kMostPassTokens = kTileRows / 2;
constexpr int64_t kDigitRow = kChunkInputs;  // bytes from one row of digits to the next

// Passes over the weights are of equally many tokens: the last begins early enough for that.
struct DigitPasses {
  int64_t count, tokens;

  explicit DigitPasses(int64_t num_tokens)
      : count((num_tokens + kMostPassTokens - 1) / kMostPassTokens),
        tokens(count ? (num_tokens + count - 1) / count : 0) {}
};

constexpr int digits_each(Sixteen) { return 2; }
constexpr int digits_each(Eight) { return 1; }

// Tiles 0 to 3 are sums, 4 and 5 weights of a block, 6 its activations.
inline TileShape digit_tile_shape(int64_t num_tokens, int64_t digits_of_token = digits_each(Sixteen{})) {
  const uint8_t digits = uint8_t(digits_of_token * std::max<int64_t>(1, DigitPasses(num_tokens).tokens));
  constexpr uint8_t kQuads = kScaleInputs / kQuad, kInputs = kScaleInputs;
  return {{digits, digits, digits, digits, kQuads, kQuads, digits, digits},
          {64, 64, 64, 64, 64, 64, kInputs, kInputs}};
}

// values[(t * G + g) * kGroupRows + r] as of `group_product`, for T tokens.
template <class Format, class Activations, int G, int T>
__attribute__((noinline)) void tile_group_product(const uint8_t* group, int64_t group_bytes,
                                                  const PackedInputs& inputs, int64_t first_token,
                                                  int64_t ahead, float* values) {
  static_assert(!Format::kNests, "");
  constexpr int V = G * kGroupVecs, kLine = 64, kDigitsEach = digits_each(Activations{});
  constexpr int64_t kTokenBytes = Activations::kTokenBytes;
  constexpr int64_t kBlockBytes = (Format::kChunkBytes - Format::kHeadBytes) / 2;
  struct alignas(64) Sums {
    int32_t digits[G][T][kDigitsEach][kGroupRows];
  };
  Sums sums[2];
  alignas(64) uint8_t columns[2][G][kScaleInputs * kGroupRows];
  Tiles tiles(digit_tile_shape(inputs.num_tokens, kDigitsEach));
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
    const int32_t* const of_block = kept + (PackedInputs::first_kept<Format>() + kBlock) * num_tokens;
    const int32_t* const block_scales = kept + (PackedInputs::kBlockScales + kBlock) * num_tokens;
    UNROLL for (int v = 0; v < V; ++v) {
      const int g = v / kGroupVecs, lane = v % kGroupVecs * kLanes;
      const uint8_t* const head = chunk + g * group_bytes;
      const Vec scale = Format::scale(nullptr, head, kBlock, lane);
      UNROLL for (int t = 0; t < T; ++t) {
        Ints sum = load_ints(&sums[kBlock].digits[g][t][kDigitsEach - 1][lane]);
        if constexpr (kDigitsEach == 2)
          sum += load_ints(&sums[kBlock].digits[g][t][0][lane]) << 8;
        if constexpr (!Format::kStartsAtZero) sum += Format::start(repeat(of_block + t));
        Vec factor = scale;
        if constexpr (Activations::kScalesBlocks) factor *= (Vec)repeat(block_scales + t);
        total[v][t] = fma(__builtin_convertvector(sum, Vec), factor, total[v][t]);
      }
      if constexpr (Format::kHasMinima) {
        const Vec minimum = Format::minimum(nullptr, head, kBlock, lane);
        UNROLL for (int t = 0; t < T; ++t)
          total[v][t] = fma((Vec)repeat(of_block + t), minimum, total[v][t]);
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
    add(second, before, kept);
    kept += PackedInputs::kNumKept * num_tokens;
  }
  each<G>([&](auto g) INLINE { store_sums(second, g); });
  add(first, group, kept);
  add(second, group, kept);
  UNROLL for (int t = 0; t < T; ++t)
    UNROLL for (int v = 0; v < V; ++v) store(values + (t * V + v) * kLanes, total[v][t]);
}

}  // namespace foredraft
