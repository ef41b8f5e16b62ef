// Single products, for tests: the same numbers must come out of every instruction set.
//
// Shape legend: T tokens (activation rows), K inputs, R weight rows.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("ira-algorithm=priority")  // as decoder.cpp
#endif

#include "products.h"

#include <vector>

using namespace foredraft;

namespace {

template <class Form>
void multiply(const ForedraftMatrix& weights, Range rows, int64_t K, const float* x, int64_t T, bool in_eight,
              float* out) {
  using Order = typename Form::Order;
  std::vector<float> in_order(T * padded(K)), memory(Form::prepared_size(T, K));
  for (int64_t t = 0; t < T; ++t)
    for (int64_t k = 0; k < K; ++k) in_order[t * padded(K) + lane_order<Order>(k)] = x[t * K + k];
  const typename Form::Session session(T);
  const auto inputs = Form::inputs(memory.data(), in_order.data(), T, K, in_eight);
  Form::template prepare<Order>(inputs, in_order.data(), {0, T});
  matmul(Form::rows(weights, K), rows, inputs, T, nullptr, [&](int64_t token, int64_t row, float value) {
    out[token * (rows.end - rows.begin) + row - rows.begin] = value;
  });
}

}  // namespace

extern "C" {

__attribute__((visibility("default")))
int64_t foredraft_has_tiles() { return tiles_allowed(); }

// x [T, K] times rows [begin, end) of weights [R, K] in a ForedraftForm, packed ones in a
// ForedraftFormat, to out [T, end - begin]. Packed ones with activations of 8 bits, or of 16.
__attribute__((visibility("default")))
void foredraft_multiply(int64_t form, int64_t format, const void* weights, int64_t begin, int64_t end,
                        int64_t K, const float* x, int64_t num_tokens, int64_t in_eight, float* out) {
  with_form<bf16>(form, false, [&](auto kind) {
    multiply<decltype(kind)>({weights, format, 0}, {begin, end}, K, x, num_tokens, in_eight, out);
  });
}

// One row of packed weights [., K] as numbers.
__attribute__((visibility("default")))
void foredraft_unpack_row(int64_t format, const void* weights, int64_t row, int64_t K, float* numbers) {
  PackedMatrix({weights, format, 0}, K).unpack(row, numbers);
}

// What an instruction of tiles adds to sums [16, 16], in plain C++: rows [16, 32], columns [16, 32].
__attribute__((visibility("default")))
void foredraft_emulated_tile_product(const void* rows, const void* columns, float* sums) {
  emulated_tile_product(kTileRows, static_cast<const bf16*>(rows), static_cast<const bf16*>(columns), sums);
}

}  // extern "C"
