// The forms that weights come in, each with how it is multiplied: what a forward is written against.
//
// A form says what its matrices are (`Rows`), what it makes of activations first (`Inputs`), in whose
// lane order it wants rows of floats (`Order`), how many tokens it prepares and how many rows it gives
// to a thread at least, and what a thread holds while it multiplies (`Session`). Its matmul() and
// all_tokens() are overloads for these types. `Head` is the form of the matrix that gives logits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "int8.h"
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
  static constexpr int64_t kShareRows = kPanelRows, kPrepareTokens = 1;
  static constexpr bool kPrepares = false;
  struct Session {
    Session() {}
  };

  static int64_t panel_rows(int64_t num_tokens, int64_t K) {
    return foredraft::panel_rows(num_tokens, K);
  }
  static int64_t prepared_size(int64_t, int64_t) { return 0; }
  static Inputs inputs(float*, const float* rows, int64_t, int64_t K) { return {rows, padded(K)}; }

  template <class Type>
  static void prepare(const Inputs&, const float*, Range) {}
};

// 8 or 4 bits with scales, int8.h. The head has 8 in either case.
template <class Format>
struct Packed {
  using Rows = PackedMatrix<Format>;
  using Inputs = PackedInputs<Format>;
  using Head = Packed<Bits8>;
  using Order = float;
  using Session = Plain<float>::Session;
  static constexpr int64_t kShareRows = kGroupRows, kPrepareTokens = 1;
  static constexpr bool kPrepares = true;

  static int64_t panel_rows(int64_t, int64_t) { return kPackedPanelRows; }
  static int64_t prepared_size(int64_t T, int64_t K) { return Inputs::size(T, K); }
  static Inputs inputs(float* memory, const float*, int64_t T, int64_t K) { return {memory, T, K}; }

  template <class Type>
  static void prepare(const Inputs& x, const float* rows, Range tokens) {
    for (int64_t t = tokens.begin; t < tokens.end; ++t)
      x.template quantise<Type>(rows + t * padded(x.K), t);
  }
};

// bfloat16 as they lie in the checkpoint, multiplied on tiles.
struct Tiled {
  using Rows = TileMatrix;
  using Inputs = TileInputs;
  using Head = Tiled;
  using Order = float;
  using Session = TileSession;
  static constexpr int64_t kShareRows = kRowBlock, kPrepareTokens = kTileColumns;
  static constexpr bool kPrepares = true;

  static int64_t panel_rows(int64_t T, int64_t) { return tile_panel_rows(T); }
  static int64_t prepared_size(int64_t T, int64_t K) { return Inputs::size(T, K); }
  static Inputs inputs(float* memory, const float*, int64_t T, int64_t K) { return {memory, T, K}; }

  template <class Type>
  static void prepare(const Inputs& x, const float* rows, Range tokens) {
    x.template prepare<Type>(rows, tokens);
  }
};

template <class Form>
inline typename Form::Rows matrix(const void* data, int64_t K) {
  return {static_cast<decltype(Form::Rows::data)>(data), K};
}

// Calls work(form) with a ForedraftForm of a model whose embeddings are of type Weight.
template <class Weight, class Work>
inline auto with_form(int64_t form, const Work& work) {
  if (form == kFormInt8) return work(Packed<Bits8>{});
  if (form == kFormInt4) return work(Packed<Bits4>{});
  if constexpr (kTiles && std::is_same_v<Weight, bf16>)
    if (form == kFormTiled) return work(Tiled{});
  return work(Plain<Weight>{});
}

}  // namespace foredraft
