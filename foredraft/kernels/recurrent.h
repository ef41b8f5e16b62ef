// Recurrent layers: a short convolution between two gates, a gated delta net, or Mamba-2. What they compute is
// said in models/native/recurrent.py, and what a row's elements are in interface.h.
//
// An element's numbers depend on its state and on the elements before it alone, one after another, so they
// are the same however the elements came here. Of a tree each node goes on from its parent's matrix: that of
// the last node where it is that, else the one behind the text, and its ancestors once more.
//
// Shape legend: N elements of a row, C channels of the convolution, K its inputs, G key heads, Hv value
// heads, D key size, V value size, M outputs, W numbers of an element: C, and of a delta net beta and decay
// of each head.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "interface.h"
#include "rows.h"
#include "simd.h"
#include "team.h"

namespace foredraft {

struct RecurrentSizes {
  int64_t num_outputs, width, num_gates, element, window_size, matrix_size, state_size;

  explicit RecurrentSizes(const ForedraftRecurrent& of)
      : num_outputs(of.value_heads ? of.value_heads * of.value_size : of.channels),
        width(of.value_heads ? of.channels + num_outputs : 3 * of.channels),
        num_gates(2 * of.value_heads),
        element(of.channels + num_gates),
        window_size((of.window - 1) * of.channels),
        matrix_size(of.key_size * of.value_size),
        state_size(of.channels ? window_size + of.value_heads * matrix_size : 0) {}
};

// A recurrent layer in one forward; `Weight` as in worker.h.
template <class Weight>
class RecurrentLayer {
 public:
  // inputs: [T, width()] of the input projection. gates: [T, num_gates()]. outputs: rows in lane order.
  RecurrentLayer(const ForedraftModel& model, const ForedraftForward& forward, const ForedraftLayer& layer,
                 float* inputs, const float* gates, float* outputs)
      : model_(model), forward_(forward), layer_(layer), inputs_(inputs), gates_(gates), outputs_(outputs) {}

  int64_t width() const { return sizes_.width; }
  int64_t gate_rows() const { return is_mamba_ ? Hv : 2 * Hv; }
  int64_t num_outputs() const { return sizes_.num_outputs; }

  bool norms_all() const { return is_mamba_; }

  // With heads: elements with their convolved channels, beta and decay.
  void convolve(const Member& me) const {
    const Range mine = me.share(C, kLanesOfAll);
    for (int64_t r = 0; r < forward_.num_rows; ++r) {
      const Row row = row_of(r);
      for (int64_t n = 0; n < row.num_elements; ++n)
        for (int64_t c = mine.begin; c < mine.end; c += kLanes)
          store(row.states.elements + n * sizes_.element + c, silu(convolved(row, n, c)));
      for (int64_t n = me.index; n < row.num_elements; n += me.size) put_gates(row, n);
      keep_window(row, mine);
    }
  }

  // Outputs of all tokens, logs and states.
  void mix(const Member& me) const {
    if (!layer_.gates) return mix_convolution(me);
    const Range mine = me.share(forward_.num_rows * Hv);
    for (int64_t i = mine.begin; i < mine.end; ++i) run_head(row_of(i / Hv), i % Hv, me.index);
  }

  // Of Mamba-2: what heads gave is normed by group of those that share a key.
  void finish(const Member& me) const {
    const int64_t size = sizes_.num_outputs / G;
    const Range mine = me.share(forward_.num_tokens);
    for (int64_t t = mine.begin; t < mine.end; ++t)
      for (int64_t g = 0; g < G; ++g) {
        const float* const x = inputs_ + t * sizes_.width + C + g * size;
        const float* const weight = layer_.value_norm;
        const Vec scale = broadcast(weight ? inverse_rms(x, size, model_.norm_eps) : 1.0f);
        float* const out = outputs_ + t * padded(sizes_.num_outputs);
        for (int64_t v = 0; v < size; v += kLanes) {
          const Vec scaled = load(x + v) * scale;
          put(out, g * size + v, weight ? scaled * load(weight + g * size + v) : scaled);
        }
      }
  }

 private:
  static constexpr int64_t kLanesOfAll = 16;  // shares are the same with all instruction sets
  static constexpr int64_t kPanel = 4;        // vectors of values that are computed together

  const ForedraftModel& model_;
  const ForedraftForward& forward_;
  const ForedraftLayer& layer_;
  float* inputs_;  // of Mamba-2 its gates are replaced by what they gated
  const float* gates_;
  float* outputs_;
  const bool is_mamba_ = model_.recurrent.is_mamba;
  const RecurrentSizes sizes_{model_.recurrent};
  const int64_t C = model_.recurrent.channels, K = model_.recurrent.window;
  const int64_t G = model_.recurrent.key_heads, Hv = model_.recurrent.value_heads;
  const int64_t D = model_.recurrent.key_size, V = model_.recurrent.value_size;

  struct Row {
    const ForedraftStates& states;
    int64_t first_token, num_tokens, num_elements;

    // The element before another.
    int64_t before(int64_t element) const {
      return element < states.num_old ? element - 1 : states.parents[element - states.num_old];
    }
    bool is_logged(int64_t element) const { return element - states.num_old >= states.first_logged; }
  };

  Row row_of(int64_t r) const {
    const ForedraftRow& row = forward_.rows[r];
    const int64_t count = row.end_token - row.first_token;
    return {forward_.states[r], row.first_token, count, forward_.states[r].num_old + count};
  }

  const float* state_of(const Row& row) const { return row.states.state + layer_.number * sizes_.state_size; }
  float* save_of(const ForedraftSave& save) const { return save.values + layer_.number * sizes_.state_size; }
  const float* old_log(const Row& row, int64_t element) const {
    return row.states.old_log + layer_.number * row.states.old_stride + element * sizes_.element;
  }
  float* new_log(const Row& row, int64_t element) const {
    const int64_t place = element - row.states.num_old - row.states.first_logged;
    return row.states.new_log + layer_.number * row.states.new_stride + place * sizes_.element;
  }
  const float* input(const Row& row, int64_t element) const {
    return inputs_ + (row.first_token + element - row.states.num_old) * sizes_.width;
  }

  // What the convolution sees of some channels: of an element, or -1, -2, ... of the state.
  Vec seen(const Row& row, int64_t element, int64_t channel) const {
    if (element < 0) return load(state_of(row) + (K - 1 + element) * C + channel);
    if (element < row.states.num_old) return load(old_log(row, element) + channel);
    const float* const x = input(row, element) + channel;
    return Hv ? load(x) : load(x) * load(x + 2 * C);
  }

  Vec convolved(const Row& row, int64_t element, int64_t channel) const {
    Vec taps[16];
    for (int64_t k = K - 1, at = element; k >= 0; --k, at = at < 0 ? at - 1 : row.before(at))
      taps[k] = seen(row, at, channel);
    Vec sum = taps[0] * load(layer_.convolution + channel);
    for (int64_t k = 1; k < K; ++k) sum = fma(taps[k], load(layer_.convolution + k * C + channel), sum);
    return layer_.convolution_bias ? sum + load(layer_.convolution_bias + channel) : sum;
  }

  // Logs some channels of the row's tokens, and puts what is seen next into the states to be made.
  void keep_window(const Row& row, Range channels) const {
    for (int64_t n = row.states.num_old + row.states.first_logged; n < row.num_elements; ++n)
      for (int64_t c = channels.begin; c < channels.end; c += kLanes)
        store(new_log(row, n) + c, seen(row, n, c));
    for (int64_t s = 0; s < row.states.num_saves; ++s) {
      const ForedraftSave& save = row.states.saves[s];
      for (int64_t k = 0; k < K - 1; ++k)
        for (int64_t c = channels.begin; c < channels.end; c += kLanes)
          store(save_of(save) + k * C + c, seen(row, save.num_elements - (K - 1) + k, c));
    }
  }

  void mix_convolution(const Member& me) const {
    const Range mine = me.share(C, kLanesOfAll);
    for (int64_t r = 0; r < forward_.num_rows; ++r) {
      const Row row = row_of(r);
      for (int64_t t = 0; t < row.num_tokens; ++t) {
        float* const out = outputs_ + (row.first_token + t) * padded(C);
        for (int64_t c = mine.begin; c < mine.end; c += kLanes) {
          const int64_t element = row.states.num_old + t;
          put(out, c, load(input(row, element) + C + c) * convolved(row, element, c));
        }
      }
      keep_window(row, mine);
    }
  }

  static void put(float* row, int64_t column, Vec values) {
    for (int i = 0; i < kLanes; ++i) row[lane_order<Weight>(column + i)] = values[i];
  }

  // Beta and decay of each head.
  void put_gates(const Row& row, int64_t element) const {
    float* const out = row.states.elements + element * sizes_.element + C;
    if (element < row.states.num_old) {
      std::copy_n(old_log(row, element) + C, 2 * Hv, out);
      return;
    }
    const float* const x = gates_ + (row.first_token + element - row.states.num_old) * gate_rows();
    for (int64_t h = 0; h < Hv; ++h) {
      const float step = x[gate_rows() - Hv + h] + layer_.step_bias[h];
      const float softplus = step > 20.0f ? step : std::log1p(std::exp(step));
      out[h] = is_mamba_ ? softplus : 1.0f / (1.0f + std::exp(-x[h]));
      out[Hv + h] = std::exp(-layer_.decay_rates[h] * softplus);
    }
    if (row.is_logged(element)) std::copy_n(out, 2 * Hv, new_log(row, element) + C);
  }

  // Brings a head's numbers to a length of `scale`.
  void put_unit(const float* x, float scale, float* out) const {
    float squares = 0;
    for (int64_t i = 0; i < D; ++i) squares += x[i] * x[i];
    const float factor = scale / std::sqrt(squares + 1e-6f);
    for (int64_t i = 0; i < D; ++i) out[i] = x[i] * factor;
  }

  // Takes an element into a head's matrix [D, V]; what it reads then goes to `read`, or nowhere.
  void step(const Row& row, int64_t head, int64_t element, float* matrix, float* read) const {
    constexpr int64_t kMost = 1024;
    float key[kMost], query[kMost];
    const float* const x = row.states.elements + element * sizes_.element;
    const int64_t of_keys = (model_.recurrent.is_tiled ? head % G : head / (Hv / G)) * D;
    if (is_mamba_) {
      std::copy_n(x + G * D + of_keys, D, key);
      std::copy_n(x + of_keys, D, query);
    } else {
      put_unit(x + G * D + of_keys, 1.0f, key);
      if (read) put_unit(x + of_keys, 1.0f / std::sqrt(float(D)), query);
    }
    const float* const values = x + 2 * G * D + head * V;
    const float beta = x[C + head], decay = x[C + Hv + head];
    int64_t v = 0;
    for (; v + kPanel * kLanes <= V; v += kPanel * kLanes)
      step_panel<kPanel>(key, query, values + v, beta, decay, matrix + v, read ? read + v : nullptr);
    for (; v < V; v += kLanes)
      step_panel<1>(key, query, values + v, beta, decay, matrix + v, read ? read + v : nullptr);
  }

  template <int kVectors>
  void step_panel(const float* key, const float* query, const float* values, float beta, float decay,
                  float* matrix, float* read) const {
    Vec sums[kVectors] = {}, deltas[kVectors];
    const Vec decays = broadcast(decay);
    for (int64_t d = 0; !is_mamba_ && d < D; ++d) {
      const Vec k = broadcast(key[d]);
      UNROLL for (int i = 0; i < kVectors; ++i) sums[i] = fma(k, load(matrix + d * V + i * kLanes), sums[i]);
    }
    UNROLL for (int i = 0; i < kVectors; ++i) {
      deltas[i] = (load(values + i * kLanes) - decays * sums[i]) * broadcast(beta);
      sums[i] = Vec{};
    }
    for (int64_t d = 0; d < D; ++d) {
      const Vec k = broadcast(key[d]), q = read ? broadcast(query[d]) : Vec{};
      UNROLL for (int i = 0; i < kVectors; ++i) {
        float* const at = matrix + d * V + i * kLanes;
        const Vec now = fma(k, deltas[i], load(at) * decays);
        store(at, now);
        sums[i] = fma(q, now, sums[i]);
      }
    }
    if (read) UNROLL for (int i = 0; i < kVectors; ++i) store(read + i * kLanes, sums[i]);
  }

  // All elements of a row through one head's matrix.
  void run_head(const Row& row, int64_t head, int thread) const {
    float* const matrix = forward_.matrices + thread * 2 * sizes_.matrix_size;
    float* const behind_text = matrix + sizes_.matrix_size;
    const int64_t at = sizes_.window_size + head * sizes_.matrix_size, size = sizes_.matrix_size;
    std::copy_n(state_of(row) + at, size, matrix);
    const int64_t num_text = text_of(row);
    const ForedraftSave* save = row.states.saves;
    const ForedraftSave* const end = save + row.states.num_saves;
    for (int64_t n = 0; n < row.num_elements; ++n) {
      if (n == num_text) std::copy_n(matrix, size, behind_text);
      if (n >= num_text && (n == num_text || row.before(n) != n - 1)) {
        if (n > num_text) std::copy_n(behind_text, size, matrix);
        replay(row, head, row.before(n), num_text, matrix);
      }
      float read[1024];
      const bool is_own = n >= row.states.num_old;
      step(row, head, n, matrix, is_own ? read : nullptr);
      if (is_own) put_output(row, head, n, read);
      if (save < end && save->num_elements == n + 1) std::copy_n(matrix, size, save_of(*save++) + at);
    }
  }

  // Elements of the text: behind them each goes on from the one before, or from a node.
  static int64_t text_of(const Row& row) {
    int64_t n = row.num_elements;
    while (n > 0 && row.before(n - 1) == n - 2) --n;  // behind here is a chain
    if (n == 0) return row.num_elements;
    int64_t first = row.num_elements;  // the smallest element that a node goes back to
    for (int64_t i = 0; i < row.num_elements; ++i)
      if (row.before(i) != i - 1) first = std::min(first, row.before(i) + 1);
    return first;
  }

  // Takes a node's ancestors in, and itself.
  void replay(const Row& row, int64_t head, int64_t node, int64_t num_text, float* matrix) const {
    if (node < num_text) return;
    replay(row, head, row.before(node), num_text, matrix);
    step(row, head, node, matrix, nullptr);
  }

  // Normed by the head, and gated; of Mamba-2 only gated.
  void put_output(const Row& row, int64_t head, int64_t element, const float* read) const {
    const int64_t token = row.first_token + element - row.states.num_old;
    float* const gates = inputs_ + token * sizes_.width + C + head * V;
    if (is_mamba_) {
      const float* const values = row.states.elements + element * sizes_.element + 2 * G * D + head * V;
      const Vec skip = broadcast(layer_.skips[head]);
      for (int64_t v = 0; v < V; v += kLanes)
        store(gates + v, fma(skip, load(values + v), load(read + v)) * silu(load(gates + v)));
      return;
    }
    const Vec scale = broadcast(inverse_rms(read, V, model_.norm_eps));
    float* const out = outputs_ + token * padded(sizes_.num_outputs);
    for (int64_t v = 0; v < V; v += kLanes)
      put(out, head * V + v, load(read + v) * scale * load(layer_.value_norm + v) * silu(load(gates + v)));
  }
};

}  // namespace foredraft
