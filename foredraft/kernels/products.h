// The forms that weights come in, each with how it is multiplied: what a forward is written against.
//
// A form says what its matrices are (`Rows`), what it makes of activations first (`Inputs`), in whose
// lane order it wants rows of floats (`Order`), how many rows it gives to a thread at least, and what a
// thread holds while it multiplies so many tokens (`Session`), how inputs of some tokens are put side by
// side (`gather`), whether attention beside it is computed on tiles, and whether experts beside it may be
// packed. With `in_eight` activations are to have 8 bits,
// which its matrices must take (`takes_eight`).
// Its all_tokens() and panel_rows() are overloads for these types.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "attention_floats.h"
#include "attention_tiles.h"
#include "interface.h"
#include "matmul.h"
#include "packed.h"
#include "simd.h"
#include "tiles.h"

namespace foredraft {

// As they lie in the checkpoint, multiplied in float32.
template <class Weight>
struct Plain {
  using Rows = Matrix<Weight>;
  using Inputs = Activations;
  using Order = Weight;
  static constexpr int64_t kShareRows = kPanelRows;
  static constexpr bool kPrepares = false, kAttendsOnTiles = false, kMayPackExperts = true;
  struct Session {
    explicit Session(int64_t) {}  // more than a variable nobody uses
    void resume() const {}
  };

  static Rows rows(const ForedraftMatrix& matrix, int64_t K) {
    return {static_cast<const Weight*>(matrix.data), K};
  }
  static int64_t prepared_size(int64_t, int64_t) { return 0; }
  static Inputs inputs(float*, const float* rows, int64_t, int64_t K, bool) { return {rows, padded(K)}; }

  template <class Type>
  static void prepare(const Inputs&, const float*, Range) {}

  template <class TokenOf>
  static Inputs gather(float* memory, const Inputs& all, int64_t count, const TokenOf& token_of) {
    for (int64_t i = 0; i < count; ++i)
      std::copy_n(all.row(token_of(i)), all.stride, memory + i * all.stride);
    return {memory, all.stride};
  }
};

// In few bits, each matrix in a format of its own.
template <bool kTileAttention>
struct Packed {
  using Rows = PackedMatrix;
  using Inputs = PackedInputs;
  using Order = float;
  struct Session : TileSession {
    explicit Session(int64_t num_tokens) : TileSession(digit_tile_shape(num_tokens)) {}
  };
  static constexpr int64_t kShareRows = kGroupRows;
  static constexpr bool kPrepares = true, kAttendsOnTiles = kTileAttention, kMayPackExperts = false;

  static Rows rows(const ForedraftMatrix& matrix, int64_t K) { return {matrix, K}; }
  static int64_t prepared_size(int64_t T, int64_t K) { return Inputs::size(T, K); }
  static Inputs inputs(float* memory, const float*, int64_t T, int64_t K, bool in_eight) {
    return {memory, T, K, in_eight};
  }

  template <class Type>
  static void prepare(const Inputs& x, const float* rows, Range tokens) {
    for (int64_t t = tokens.begin; t < tokens.end; ++t)
      x.template quantise<Type>(rows + t * padded(x.K), t);
  }

  template <class TokenOf>
  static Inputs gather(float* memory, const Inputs& all, int64_t count, const TokenOf& token_of) {
    return all.gathered(memory, count, token_of);
  }
};

// bfloat16 in groups of rows, multiplied on tiles.
struct Tiled {
  using Rows = TileMatrix;
  using Inputs = TileInputs;
  using Order = float;
  struct Session : TileSession {
    explicit Session(int64_t num_tokens) : TileSession(tile_shape(num_tokens)) {}
  };
  static constexpr int64_t kShareRows = kGroupRows;
  static constexpr bool kPrepares = true, kAttendsOnTiles = true, kMayPackExperts = false;

  static Rows rows(const ForedraftMatrix& matrix, int64_t K) {
    return {static_cast<const uint8_t*>(matrix.data), K};
  }
  static int64_t prepared_size(int64_t T, int64_t K) { return Inputs::size(T, K); }
  static Inputs inputs(float* memory, const float*, int64_t T, int64_t K, bool) { return {memory, T, K}; }

  template <class Type>
  static void prepare(const Inputs& x, const float* rows, Range tokens) {
    x.template prepare<Type>(rows, tokens);
  }

  template <class TokenOf>
  static Inputs gather(float* memory, const Inputs& all, int64_t count, const TokenOf& token_of) {
    return all.gathered(memory, count, token_of);
  }
};

// How attention is computed beside matrices of a form.
template <class Weight, class Form>
using AttentionOf =
    std::conditional_t<Form::kAttendsOnTiles, TileAttention, FloatAttention<Weight>>;

// All of `rows`, in panels that stay in the nearest caches while all tokens pass over them:
// put(token, row, value) for each output. While a panel is multiplied the one behind it is prefetched,
// and in the end what the thread reads next, if that is known.
template <class Rows, class Inputs, class Put>
inline void matmul(const Rows& weights, Range rows, const Inputs& x, int64_t num_tokens,
                   const void* next, const Put& put) {
  const int64_t step = panel_rows(weights, num_tokens);
  for (int64_t row = rows.begin; row < rows.end; row += step) {
    const int64_t end = std::min(row + step, rows.end);
    const void* const ahead = end < rows.end ? weights.at(end) : next ? next : weights.at(row);
    all_tokens(weights, Range{row, end}, x, num_tokens, ahead, put);
  }
}

// Calls work(form) with a ForedraftForm of a model whose cache is of type Weight.
// Attention on tiles knows no windows and no caps: models that have such attend in float32.
template <class Weight, class Work>
inline auto with_form(int64_t form, bool attends_in_floats, const Work& work) {
  constexpr bool kTileCache = kTiles && std::is_same_v<Weight, bf16>;  // bfloat16 as well
  if (form == kFormPacked)
    return kTileCache && tiles_allowed() && !attends_in_floats ? work(Packed<kTileCache>{})
                                                               : work(Packed<false>{});
  if constexpr (kTileCache)
    if (form == kFormTiled) return work(Tiled{});
  return work(Plain<Weight>{});
}

}  // namespace foredraft
