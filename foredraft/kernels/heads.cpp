// Small steps of drafting with trained heads, between forwards of their layers: each would take
// longer to ask a tensor library for than to do.
//
// Shape legend: T tokens, E hidden size, N nodes, R output rows, K candidates of a node.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

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

// The likeliest rows of a node, best first; of equal logits the first.
class Best {
 public:
  Best(int64_t wanted, int64_t* rows, double* logits)
      : wanted_(wanted), rows_(rows), logits_(logits) {}

  // What a logit has to exceed.
  float floor() const { return floor_; }
  int64_t found() const { return found_; }

  void offer(int64_t row, float logit) {
    if (!(logit > floor_)) return;
    int64_t at = found_ < wanted_ ? found_++ : wanted_ - 1;
    for (; at > 0 && logits_[at - 1] < double(logit); --at)
      rows_[at] = rows_[at - 1], logits_[at] = logits_[at - 1];
    rows_[at] = row, logits_[at] = double(logit);
    if (found_ == wanted_) floor_ = float(logits_[wanted_ - 1]);
  }

 private:
  int64_t wanted_, found_ = 0;
  int64_t* rows_;
  double* logits_;
  float floor_ = -std::numeric_limits<float>::infinity();
};

void find_best(const float* logits, int64_t R, Best& best) {
  constexpr int64_t kBlock = 4 * kLanes;
  int64_t i = 0;
  for (; i + kBlock <= R; i += kBlock) {
    const float* x = logits + i;
    const Vec most = max(max(load(x), load(x + kLanes)),
                         max(load(x + 2 * kLanes), load(x + 3 * kLanes)));
    if (!(max_lanes(most) > best.floor())) continue;
    for (int64_t j = 0; j < kBlock; ++j) best.offer(i + j, x[j]);
  }
  for (; i < R; ++i) best.offer(i, logits[i]);
}

// The sum of e^(scale (logit - largest)).
double total(const float* logits, int64_t R, float largest, float scale) {
  Vec sums{};
  int64_t i = 0;
  for (; i + kLanes <= R; i += kLanes)
    sums += exp((load(logits + i) - largest) * scale);
  double sum = double(sum_lanes(sums));
  for (; i < R; ++i) sum += std::exp(double((logits[i] - largest) * scale));
  return sum;
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

// The K likeliest tokens of each of N nodes, best first, with their probabilities at 1 / `scale`
// degrees, from logits [N, R] of the tokens `ids`; those of less than `least` are left out. tokens and
// chances are [N, K]; found [N] says how many there are.
__attribute__((visibility("default"))) void foredraft_candidates(
    const float* logits, int64_t num_nodes, int64_t R, int64_t K, double scale, double least,
    const int64_t* ids, int64_t* tokens, double* chances, int64_t* found) {
  for (int64_t n = 0; n < num_nodes; ++n, logits += R, tokens += K, chances += K) {
    Best best(K, tokens, chances);
    find_best(logits, R, best);
    const double largest = chances[0];
    const double sum = best.found() ? total(logits, R, float(largest), float(scale)) : 1;
    for (found[n] = 0; found[n] < best.found(); ++found[n]) {
      const int64_t k = found[n];
      chances[k] = std::exp((chances[k] - largest) * scale) / sum;
      if (!(chances[k] >= least)) break;
      tokens[k] = ids[tokens[k]];
    }
  }
}

}  // extern "C"
