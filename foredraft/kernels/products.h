// The forms that weights come in, each with how it is multiplied: what a forward is written against.
//
// A form says what its matrices are (`Rows`), what it makes of activations first (`Inputs`), in whose
// lane order it wants rows of floats (`Order`), how many rows it gives to a thread at least, and what a
// thread holds while it multiplies so many tokens (`Session`), and whether attention beside it is computed
// on tiles. Its all_tokens() and panel_rows() are overloads for these types. `Head` is the form of the
// matrix that gives logits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "attention_floats.h"
#include "attention_tiles.h"
#include "int8_tiles.h"
#include "interface.h"
#include "matmul.h"
#include "simd.h"
#include "tiles.h"

namespace foredraft {

// As they lie in the checkpoint, multiplied in float32.
template <class Weight>
struct Plain {
  using Rows = Matrix<Weight>;
  using Inputs = Activations;
  using Head = Plain;
  using Order = Weight;
  static constexpr int64_t kShareRows = kPanelRows;
  static constexpr bool kPrepares = false, kAttendsOnTiles = false;
  struct Session {
    explicit Session(int64_t) {}  // more than a variable nobody uses
    void resume() const {}
  };

  static int64_t prepared_size(int64_t, int64_t) { return 0; }
  static Inputs inputs(float*, const float* rows, int64_t, int64_t K) { return {rows, padded(K)}; }

  template <class Type>
  static void prepare(const Inputs&, const float*, Range) {}
};

// 8 or 4 bits with scales, int8.h. The head has 8 in either case.
template <class Format, bool kTileAttention>
struct Packed {
  using Rows = PackedMatrix<Format>;
  using Inputs = PackedInputs<Format>;
  using Head = Packed<Bits8, kTileAttention>;
  using Order = float;
  struct Session : TileSession {
    explicit Session(int64_t num_tokens) : TileSession(digit_tile_shape(num_tokens)) {}
  };
  static constexpr int64_t kShareRows = kGroupRows;
  static constexpr bool kPrepares = true, kAttendsOnTiles = kTileAttention;

  static int64_t prepared_size(int64_t T, int64_t K) { return Inputs::size(T, K); }
  static Inputs inputs(float* memory, const float*, int64_t T, int64_t K) { return {memory, T, K}; }

  template <class Type>
  static void prepare(const Inputs& x, const float* rows, Range tokens) {
    for (int64_t t = tokens.begin; t < tokens.end; ++t)
      x.template quantise<Type>(rows + t * padded(x.K), t);
  }
};

// bfloat16 in groups of rows, multiplied on tiles.
struct Tiled {
  using Rows = TileMatrix;
  using Inputs = TileInputs;
  using Head = Tiled;
  using Order = float;
  struct Session : TileSession {
    explicit Session(int64_t num_tokens) : TileSession(tile_shape(num_tokens)) {}
  };
  static constexpr int64_t kShareRows = kGroupRows;
  static constexpr bool kPrepares = true, kAttendsOnTiles = true;

  static int64_t prepared_size(int64_t T, int64_t K) { return Inputs::size(T, K); }
  static Inputs inputs(float* memory, const float*, int64_t T, int64_t K) { return {memory, T, K}; }

  template <class Type>
  static void prepare(const Inputs& x, const float* rows, Range tokens) {
    x.template prepare<Type>(rows, tokens);
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

template <class Form>
inline typename Form::Rows matrix(const void* data, int64_t K) {
  return {static_cast<decltype(Form::Rows::data)>(data), K};
}

// One of several matrices of so many rows that lie one below the other.
template <class Rows>
inline Rows part_of(const Rows& all, int64_t rows, int64_t index) {
  return {all.data + index * (all.behind(rows).data - all.data), all.K};
}

// Calls work(form) with a ForedraftForm of a model whose embeddings are of type Weight.
// Attention on tiles knows no windows and no caps: models that have such attend in float32.
template <class Weight, class Work>
inline auto with_form(int64_t form, bool attends_in_floats, const Work& work) {
  constexpr bool kTileCache = kTiles && std::is_same_v<Weight, bf16>;  // bfloat16 as well
  const bool attends_on_tiles = kTileCache && tiles_allowed() && !attends_in_floats;
  const auto packed = [&](auto format) {
    using Format = decltype(format);
    return attends_on_tiles ? work(Packed<Format, kTileCache>{}) : work(Packed<Format, false>{});
  };
  if (form == kFormInt8) return packed(Bits8{});
  if (form == kFormInt4) return packed(Bits4{});
  if constexpr (kTileCache)
    if (form == kFormTiled) return work(Tiled{});
  return work(Plain<Weight>{});
}

}  // namespace foredraft
