// A matrix packed in few bits, in a format that is known only when it runs: each matrix of a model may
// have one of its own.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "formats.h"
#include "groups.h"
#include "int8.h"
#include "int8_tiles.h"
#include "interface.h"
#include "nested.h"
#include "team.h"

namespace foredraft {

// ---- formats ------------------------------------------------------------------------------------

// values[(t * G + g) * kGroupRows + r] of G groups and some tokens: on tiles 1 or 2, else 1.
using GroupProduct = void (*)(const uint8_t* group, int64_t group_bytes, const PackedInputs& inputs,
                              int64_t first_token, int64_t ahead, float* values);

// values[(t - tokens.begin) * kGroupRows + r] of one group and up to kMostManyTokens tokens.
using ManyProducts = void (*)(const uint8_t* group, const PackedInputs& inputs, Range tokens,
                              int64_t ahead, float* values);

// Null for sizes that do not fit the registers.
struct ProductCode {
  GroupProduct in_vectors[kPackedBlockTokens];                        // [tokens - 1]
  GroupProduct on_tiles[2][kMostPassTokens - kFewestTileTokens + 1];  // [1, 2 groups; tokens - 4]
  ManyProducts of_many;                                               // of more tokens than registers hold
};

// What there is of a format.
struct FormatCode {
  int64_t (*group_bytes)(int64_t K);
  ProductCode of_sixteen, of_eight;  // bits of an activation; null: it has none of 8
  void (*unpack_row)(const uint8_t* group, int64_t row, int64_t K, float* numbers);
};

// K-quants, with activations of 8 bits.
template <class Format, class Activations>
constexpr bool kNestedEight = Format::kNests && std::is_same_v<Activations, Eight>;

// Others of more than 4 bits are there for more precision than activations of 8 would leave; and products
// of larger integers are more than AVX2 adds up in 16 bits.
template <class Format, class Activations>
constexpr bool kTakes = Format::kMost < (Format::kNests ? 64 : 16) || std::is_same_v<Activations, Sixteen>;

template <class Format, class Activations, int T>
constexpr GroupProduct vector_product() {
  if constexpr (!kTakes<Format, Activations>) return nullptr;
  else if constexpr (kNestedEight<Format, Activations>) return nested_product<Format, T>;
  else return group_product<Format, Activations, T>;
}

template <class Format, class Activations>
constexpr ManyProducts many_products_of() {
  if constexpr (kNestedEight<Format, Activations>) return many_products<Format>;
  else return nullptr;
}

// K-quants stay in vectors: their products with activations of 8 bits, which is how they are multiplied
// unless somebody asks for 16, have sums in another order than tiles give. Where tiles are emulated, two
// formats show what they compute, and the others would take minutes to compile.
template <class Format>
constexpr bool kTilesFor =
    kTiles && !Format::kNests &&
    (!kEmulatesTiles || std::is_same_v<Format, Int8> || std::is_same_v<Format, Int4>);

template <class Format, class Activations, int G, int T>
constexpr GroupProduct tile_product_of() {
  if constexpr (kTilesFor<Format> && kTakes<Format, Activations>)
    return tile_group_product<Format, Activations, G, T>;
  else return nullptr;
}

template <class Format, class Activations, int... kToken, int... kTileToken>
constexpr ProductCode products_of(std::integer_sequence<int, kToken...>,
                                  std::integer_sequence<int, kTileToken...>) {
  return {{vector_product<Format, Activations, kToken + 1>()...},
          {{tile_product_of<Format, Activations, 1, kTileToken + kFewestTileTokens>()...},
           {tile_product_of<Format, Activations, 2, kTileToken + kFewestTileTokens>()...}},
          many_products_of<Format, Activations>()};
}

template <class Format>
constexpr FormatCode code_of() {
  const std::make_integer_sequence<int, kPackedBlockTokens> tokens;
  const std::make_integer_sequence<int, kMostPassTokens - kFewestTileTokens + 1> tile_tokens;
  return {Format::group_bytes, products_of<Format, Sixteen>(tokens, tile_tokens),
          products_of<Format, Eight>(tokens, tile_tokens), unpack_row<Format>};
}

constexpr FormatCode kFormats[kNumFormats] = {  // by ForedraftFormat
    code_of<Int8>(),    code_of<Int4>(),    code_of<Int5>(),     code_of<Nested4>(),
    code_of<Nested5>(), code_of<Nested6>(), code_of<Centred4>(), code_of<Centred5>(),
    code_of<Nested2>(), code_of<Nested3>(), code_of<Codes<kCodesIq4>>(), code_of<Codes<kCodesFp4>>(),
    code_of<NestedCodes<kCodesIq4>>(), code_of<NestedCodes<kCodesIq2>>(),
    code_of<NestedCodes<kCodesIq3S>>(), code_of<NestedCodes<kCodesIq3>>()};

// ---- matrices -----------------------------------------------------------------------------------

// [rows, K] in groups of rows.
struct PackedMatrix {
  const uint8_t* data;
  int64_t K;
  const FormatCode* code;

  PackedMatrix(const ForedraftMatrix& matrix, int64_t K)
      : data(static_cast<const uint8_t*>(matrix.data)), K(K), code(kFormats + matrix.format) {}

  int64_t group_bytes() const { return code->group_bytes(K); }
  const uint8_t* group(int64_t row) const { return data + row / kGroupRows * group_bytes(); }
  const void* at(int64_t row) const { return group(row); }
  bool takes_eight() const { return code->of_eight.in_vectors[0]; }
  const ProductCode& products(const PackedInputs& x) const {
    return x.are_eight ? code->of_eight : code->of_sixteen;
  }
  // One row as numbers.
  void unpack(int64_t row, float* numbers) const {
    code->unpack_row(group(row), row % kGroupRows, K, numbers);
  }
};

// Tiles take as many tokens on every machine, vectors fewer where they are short.
constexpr int kMostBlockTokens =
    kTiles ? std::max(kPackedBlockTokens, kMostPassTokens) : kPackedBlockTokens;

// So many groups of rows from `row` against tokens [first, first + count), put out from `put_from` on.
template <int G, class Put>
inline void some_groups(GroupProduct product, const PackedMatrix& weights, int64_t row, int64_t num_rows,
                        const PackedInputs& x, int64_t first, Range tokens, int64_t ahead,
                        const Put& put) {
  alignas(64) float values[G * kGroupRows * kMostBlockTokens];
  product(weights.group(row), weights.group_bytes(), x, first, ahead, values);
  put_block<G>(values, first, tokens, x.scales, row, num_rows, put);
}

template <class Put>
inline void all_tokens_in_vectors(const PackedMatrix& weights, Range rows, const PackedInputs& x,
                                  int64_t num_tokens, int64_t ahead, const Put& put) {
  const ProductCode& code = weights.products(x);
  const int64_t rounds = (num_tokens + kPackedBlockTokens - 1) / kPackedBlockTokens;
  for (int64_t row = rows.begin; row < rows.end; row += kGroupRows)
    for (int64_t round = 0; round < rounds; ++round) {
      const Range tokens{num_tokens * round / rounds, num_tokens * (round + 1) / rounds};
      some_groups<1>(code.in_vectors[tokens.end - tokens.begin - 1], weights, row,
                     std::min(kGroupRows, rows.end - row), x, tokens.begin, tokens, ahead, put);
    }
}

// Each group is unpacked once for all tokens that its totals have room for.
template <class Put>
inline void all_tokens_at_once(ManyProducts products, const PackedMatrix& weights, Range rows,
                               const PackedInputs& x, int64_t num_tokens, int64_t ahead,
                               const Put& put) {
  alignas(64) float values[kMostManyTokens * kGroupRows];
  const int64_t rounds = (num_tokens + kMostManyTokens - 1) / kMostManyTokens;
  for (int64_t row = rows.begin; row < rows.end; row += kGroupRows)
    for (int64_t round = 0; round < rounds; ++round) {
      const Range tokens{num_tokens * round / rounds, num_tokens * (round + 1) / rounds};
      products(weights.group(row), x, tokens, ahead, values);
      put_block<1>(values, tokens.begin, tokens, x.scales, row, std::min(kGroupRows, rows.end - row), put);
    }
}

template <class Put>
inline void all_tokens_on_tiles(const PackedMatrix& weights, Range rows, const PackedInputs& x,
                                int64_t num_tokens, int64_t ahead, const Put& put) {
  const ProductCode& code = weights.products(x);
  const DigitPasses passes(num_tokens);
  if (x.are_eight) TileSession::shape(digit_tile_shape(num_tokens, digits_each(Eight{})));
  int64_t row = rows.begin;
  const auto in_blocks = [&](auto groups, const GroupProduct* products) {
    constexpr int G = decltype(groups)::value;
    constexpr int64_t kRows = G * kGroupRows;
    for (; rows.end - row > kRows - kGroupRows; row += kRows)
      for (int64_t first = 0; first < num_tokens; first += passes.tokens)
        some_groups<G>(products[passes.tokens - kFewestTileTokens], weights, row,
                       std::min(kRows, rows.end - row), x,
                       std::min(first, num_tokens - passes.tokens),
                       {first, std::min(first + passes.tokens, num_tokens)}, ahead, put);
  };
  in_blocks(std::integral_constant<int, 2>{}, code.on_tiles[1]);
  in_blocks(std::integral_constant<int, 1>{}, code.on_tiles[0]);
  if (x.are_eight) TileSession::shape(digit_tile_shape(num_tokens, digits_each(Sixteen{})));
}

// Weight rows `rows`, which begin with a group, against all tokens. As many bytes at `ahead` are
// prefetched meanwhile.
template <class Put>
inline void all_tokens(const PackedMatrix& weights, Range rows, const PackedInputs& x,
                       int64_t num_tokens, const void* ahead, const Put& put) {
  if (!num_tokens) return;
  const int64_t distance = static_cast<const uint8_t*>(ahead) - weights.group(rows.begin);
  const bool on_tiles = weights.products(x).on_tiles[0][0] && num_tokens >= kFewestTileTokens;
  const ManyProducts of_many = weights.products(x).of_many;
  if (on_tiles && tiles_allowed()) all_tokens_on_tiles(weights, rows, x, num_tokens, distance, put);
  else if (of_many && num_tokens > kPackedBlockTokens)
    all_tokens_at_once(of_many, weights, rows, x, num_tokens, distance, put);
  else all_tokens_in_vectors(weights, rows, x, num_tokens, distance, put);
}

// Tiles take two groups at once.
inline int64_t panel_rows(const PackedMatrix&, int64_t) { return (kTiles ? 4 : 1) * kGroupRows; }

}  // namespace foredraft
