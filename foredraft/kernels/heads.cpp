// Small steps of drafting with trained heads, between forwards of their layers: each would take
// longer to ask a tensor library for than to do.
//
// Shape legend: T tokens, E hidden size, N nodes, R output rows, K candidates of a node.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "simd.h"

using namespace foredraft;

namespace {

inline float to_single(const float* x) { return *x; }
inline float to_single(const bf16* x) { return to_float(*x); }

// Brings a row to a root mean square of 1.
template <class Number>
void unit_row(const Number* x, int64_t E, float eps, float* out) {
  float squares[16] = {};
  for (int64_t i = 0; i < E; ++i) out[i] = to_single(x + i);
  int64_t i = 0;
  for (; i + 16 <= E; i += 16)
    for (int lane = 0; lane < 16; ++lane) squares[lane] += out[i + lane] * out[i + lane];
  for (; i < E; ++i) squares[0] += out[i] * out[i];
  float sum = 0;
  for (float square : squares) sum += square;
  const float scale = 1.0f / std::sqrt(sum / float(E) + eps);
  for (int64_t k = 0; k < E; ++k) out[k] *= scale;
}

}  // namespace

extern "C" {

// Rows [T, E] of bfloat16 or float32 with a root mean square of 1 each, to rows `out_stride` apart.
__attribute__((visibility("default"))) void foredraft_unit_rows(
    const void* rows, int64_t is_bf16, int64_t num_tokens, int64_t stride, int64_t E, double eps,
    float* out, int64_t out_stride) {
  for (int64_t t = 0; t < num_tokens; ++t) {
    float* to = out + t * out_stride;
    if (is_bf16) unit_row(static_cast<const bf16*>(rows) + t * stride, E, float(eps), to);
    else unit_row(static_cast<const float*>(rows) + t * stride, E, float(eps), to);
  }
}

// Adds rows of a table [V, E] in bfloat16 to rows [T, E].
__attribute__((visibility("default"))) void foredraft_add_rows(
    const void* table, const int64_t* ids, int64_t num_tokens, int64_t E, float* rows) {
  for (int64_t t = 0; t < num_tokens; ++t) {
    const bf16* added = static_cast<const bf16*>(table) + ids[t] * E;
    for (int64_t i = 0; i < E; ++i) rows[t * E + i] += to_float(added[i]);
  }
}

}  // extern "C"
