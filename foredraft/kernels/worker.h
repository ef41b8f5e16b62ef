// A llama-shaped decoder for a few tokens at a time, on CPU.
//
// One call runs one forward plan through all layers, inside one team of threads. A forward of few
// tokens costs what reading the weights from memory costs, so everything here serves that: weights
// are read once, in the checkpoint's own layout or packed (groups.h), activations stay in caches as
// float32, and threads meet at barriers that take a fraction of a microsecond while each of them has a
// core.
//
// Shape legend: T tokens of the forward, N tokens whose logits are wanted, L layers, E hidden size,
// H query heads, G query heads per key-value head, D head size, F feed-forward width, V vocabulary.
//
// Phases of a layer, a barrier after each; "split" says what the threads share out:
//   qkv         split by weight row     hidden -> normed -> qkv; keys and values -> cache
//   attend      split by tile, chunk    qkv -> query; query, cache -> attended
//   output      split by weight row     hidden += attended . W
//   gate_up     split by weight row     hidden -> normed; feed_forward = silu(gate) * up
//   down        split by weight row     hidden += feed_forward . W
// Whatever one core writes and another reads costs a transfer, in a machine of several dies some
// tenths of a microsecond. So each thread normalises few tokens for itself, all of them; many
// tokens are split, with one more barrier.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "attend.h"
#include "attention_plan.h"
#include "interface.h"
#include "products.h"
#include "rows.h"
#include "simd.h"
#include "team.h"
#include "workspace.h"

namespace foredraft {

// One thread's view of a forward. `Weight` is the type of embeddings and cache, `Form` that of the
// other matrices; see products.h.
template <class Weight, class Form>
class Worker {
 public:
  Worker(const ForedraftModel& model, const ForedraftForward& forward,
         const Workspace<Weight, Form>& work, const std::vector<Visible>& visible,
         const AttentionPlan& plan, Member me)
      : model_(model), forward_(forward), work_(work), visible_(visible), plan_(plan), me_(me),
        clock_(me.index == 0 ? forward.phase_seconds : nullptr) {}

  void run() {
    layers();
    normalise<typename Form::Head>(forward_.num_wanted, forward_.wanted, model_.final_norm);
    head();
    end(kHead);
    draw();
  }

 private:
  const ForedraftModel& model_;
  const ForedraftForward& forward_;
  const Workspace<Weight, Form>& work_;
  const std::vector<Visible>& visible_;
  const AttentionPlan& plan_;
  Member me_;
  PhaseClock clock_;
  const typename Form::Session session_{forward_.num_tokens};

  const int64_t T = forward_.num_tokens, E = model_.hidden, D = model_.head_dim;
  const int64_t H = model_.num_heads, F = model_.feed_forward;
  const int64_t qkv_width = (H + 2 * model_.num_kv_heads) * D;

  const bool few_ = T <= kFewTokens;
  float* const normed_ = work_.normed + (few_ ? me_.index * work_.normed_size : 0);
  float* const prepared_ = work_.prepared + (few_ ? me_.index * work_.prepared_size : 0);

  // Threads meet; what they did since they last met was this phase.
  void end(Phase phase) {
    me_.sync();
    clock_.end(phase);
  }

  void layers() {
    embed();
    end(kOther);
    for (int64_t index = forward_.first_layer; index < forward_.end_layer; ++index) layer(index);
  }

  void layer(int64_t index) {
    const ForedraftLayer& layer = model_.layers[index];
    if (layer.qkv) attention(index, layer);
    if (layer.gate_up) mlp(index, layer);
    tap(index);
  }

  void attention(int64_t index, const ForedraftLayer& layer) {
    normalise(T, nullptr, layer.attention_norm);
    qkv(index, layer);
    end(kLinear);
    attend(index, layer);
    end(kAttention);
    prepare<Weight>(work_.attended, H * D);
    add_product(layer.output, layer.output_bias, work_.attended, H * D, first_gate(layer));
    end(kLinear);
  }

  void mlp(int64_t index, const ForedraftLayer& layer) {
    normalise(T, nullptr, layer.mlp_norm);
    gate_up(layer);
    end(kLinear);
    prepare<Order>(work_.feed_forward, F);
    add_product(layer.down, nullptr, work_.feed_forward, F, first_of_layer(index + 1));
    end(kLinear);
  }

  using Rows = typename Form::Rows;
  using Inputs = typename Form::Inputs;
  using Order = typename Form::Order;  // of normed and feed_forward rows
  static constexpr const Order* kOrder = nullptr;  // names the type
  static constexpr int64_t kShareRows = Form::kShareRows;

  static Rows matrix(const void* data, int64_t K) { return foredraft::matrix<Form>(data, K); }

  // Where this thread's share of a coming product begins: prefetched at the end of the one before,
  // memory goes on giving while threads wait for each other.
  const void* first_gate(const ForedraftLayer& layer) const {
    return layer.gate_up ? matrix(layer.gate_up, E).at(me_.share(F, kShareRows).begin) : nullptr;
  }

  const void* first_of_layer(int64_t index) const {
    using Head = typename Form::Head;
    if (index == forward_.end_layer)
      return foredraft::matrix<Head>(model_.head, E).at(me_.share(model_.vocab, kShareRows).begin);
    const ForedraftLayer& layer = model_.layers[index];
    return layer.qkv ? matrix(layer.qkv, E).at(first_qkv_row(me_.index)) : first_gate(layer);
  }

  // Rows of K floats as products read them.
  Inputs inputs(const float* rows, int64_t K) const { return Form::inputs(prepared_, rows, T, K); }

  // Of `count` tokens those that this thread prepares as inputs of the product to come.
  Range to_prepare(int64_t count) const {
    return few_ ? Range{0, count} : me_.share(count);
  }

  void end_prepare(Phase phase) {
    if (few_) clock_.end(phase);
    else end(phase);
  }

  // Makes inputs of the rows of all tokens. They lie in this type's lane order.
  template <class Type>
  void prepare(const float* rows, int64_t K) {
    if constexpr (Form::kPrepares) {
      Form::template prepare<Type>(inputs(rows, K), rows, to_prepare(T));
      end_prepare(kLinear);
    }
  }

  // Token embeddings or given states, rotary angles, and the zeros behind rows that are filled
  // element by element.
  void embed() const {
    const Weight* table = static_cast<const Weight*>(model_.embedding);
    const Range mine = me_.share(T);
    for (int64_t t = mine.begin; t < mine.end; ++t) {
      const Weight* source = table + forward_.token_ids[t] * E;
      for (int64_t i = 0; i < E; ++i)
        work_.hidden[t * E + i] = forward_.hidden ? forward_.hidden[t * E + i] : to_float(source[i]);
      for (int64_t i = 0; i < D / 2; ++i) {
        const float angle = float(forward_.positions[t]) * model_.inv_freq[i];
        work_.cosine[t * D / 2 + i] = std::cos(angle);
        work_.sine[t * D / 2 + i] = std::sin(angle);
      }
      pad_with_zeros(work_.attended, t, H * D);
      pad_with_zeros(work_.feed_forward, t, F);
    }
  }

  // RMS-normalised hidden states in lane order, of all tokens or of those listed, and inputs of them.
  template <class For = Form>
  void normalise(int64_t count, const int32_t* tokens, const float* weight) {
    const Range mine = to_prepare(count);
    for (int64_t i = mine.begin; i < mine.end; ++i) {
      const float* x = work_.hidden + (tokens ? tokens[i] : i) * E;
      const Vec scale = broadcast(inverse_rms(x, E, model_.norm_eps));
      float* row = normed_ + i * padded(E);
      const auto vector = [&](int64_t k) { return load(weight + k) * (load(x + k) * scale); };
      int64_t k = 0;
      for (; k + kPair <= E; k += kPair)
        store_in_lane_order(row + k, vector(k), vector(k + kLanes), kOrder);
      pad_with_zeros(normed_, i, E);
      for (; k < E; ++k) row[lane_order<Order>(k)] = weight[k] * (x[k] * scale[0]);
    }
    For::template prepare<Order>(For::inputs(prepared_, normed_, count, E), normed_, mine);
    end_prepare(kOther);
  }

  // Where the weight rows of a thread begin. Keys and values are dealt out in whole heads, so that
  // who computes one can finish it.
  int64_t first_qkv_row(int thread) const {
    if (thread == me_.size) return qkv_width;
    const int64_t begin = Member{me_.barrier, thread, me_.size}.share(qkv_width, kShareRows).begin;
    if (begin <= H * D) return begin;
    if (kShareRows == kGroupRows && D % kGroupRows) return H * D / kGroupRows * kGroupRows;
    return H * D + (begin - H * D + D / 2) / D * D;
  }

  void qkv(int64_t index, const ForedraftLayer& layer) const {
    const float* bias = layer.qkv_bias;
    const Range mine{first_qkv_row(me_.index), first_qkv_row(me_.index + 1)};
    matmul(matrix(layer.qkv, E), mine, inputs(normed_, E), T,
           matrix(layer.output, H * D).at(me_.share(E, kShareRows).begin),
           [&](int64_t token, int64_t row, float value) {
             work_.qkv[token * qkv_width + row] = bias ? value + bias[row] : value;
           });
    const int64_t begin = (std::max(mine.begin, H * D) + D - 1) / D, end = mine.end / D;
    for (int64_t head = begin; head < end; ++head)
      for (int64_t token = 0; token < T; ++token) put_cache(index, layer, token, head - H);
  }

  // Finishes a key head, or a value head behind those, and writes it into the cache.
  void put_cache(int64_t index, const ForedraftLayer& layer, int64_t token, int64_t kv_head) const {
    float* x = work_.qkv + token * qkv_width + (H + kv_head) * D;
    void* store = forward_.values;
    if (kv_head < model_.num_kv_heads) {
      normalise_head(x, layer.key_norm, D, model_.norm_eps);
      rotate_head(x, work_.cosine + token * D / 2, work_.sine + token * D / 2, D);
      store = forward_.keys;
    }
    Weight* target = cache_layer<Weight>(model_, forward_, store, index)
                         .entries(forward_.tables[token], kv_head % model_.num_kv_heads)
                         .at(forward_.entries[token]);
    for (int64_t i = 0; i < D; ++i) from_float(x[i], target[i]);
  }

  void attend(int64_t index, const ForedraftLayer& layer) {
    AttentionPhase<Weight, Form>{model_, forward_, work_, visible_, plan_, me_, index, layer}.run();
    if constexpr (Form::kAttendsOnTiles) session_.resume();
  }

  // hidden += x . W (+ bias)
  void add_product(const void* weights, const float* bias, const float* x, int64_t K,
                   const void* next) const {
    matmul(matrix(weights, K), me_.share(E, kShareRows), inputs(x, K), T, next,
           [&](int64_t token, int64_t row, float value) {
             work_.hidden[token * E + row] += bias ? value + bias[row] : value;
           });
  }

  // Gate and up rows go to scratch, some panels of them, before their product goes to feed_forward
  // in one stream. Lines of memory that another core has read are slow to write one by one.
  void gate_up(const ForedraftLayer& layer) const {
    const Rows gate = matrix(layer.gate_up, E), up = gate.behind(F);
    const Inputs x = inputs(normed_, E);
    const int64_t stride = work_.gate_up_rows;
    float* gates = work_.gate_up + me_.index * work_.gate_up_size;
    float* ups = gates + T * stride;
    const Range mine = me_.share(F, kShareRows);
    const void* const next = matrix(layer.down, F).at(me_.share(E, kShareRows).begin);
    const int64_t step = panel_rows(gate, T);
    int64_t first = mine.begin;  // of the rows in scratch
    for (int64_t begin = mine.begin; begin < mine.end; begin += step) {
      const Range rows{begin, std::min(begin + step, mine.end)};
      const bool is_last = rows.end == mine.end;
      const auto into = [&](float* scratch) {
        return [=](int64_t token, int64_t row, float value) {
          scratch[token * stride + row - first] = value;
        };
      };
      all_tokens(gate, rows, x, T, is_last ? next : gate.at(rows.end), into(gates));
      all_tokens(up, rows, x, T, up.at(is_last ? rows.begin : rows.end), into(ups));
      if (!is_last && rows.end - first + step <= stride) continue;
      for (int64_t t = 0; t < T; ++t)
        put_feed_forward(t, {first, rows.end}, gates + t * stride, ups + t * stride);
      first = rows.end;
    }
  }

  // silu(gate) * up of some columns. The scratch rows have room for whole vectors.
  void put_feed_forward(int64_t token, Range columns, float* gates, const float* ups) const {
    const int64_t count = columns.end - columns.begin;
    for (int64_t i = 0; i < count; i += kLanes)
      store(gates + i, silu(load(gates + i)) * load(ups + i));
    float* row = work_.feed_forward + token * padded(F);
    const float* source = gates - columns.begin;
    int64_t i = columns.begin;
    for (; i < columns.end && i % kPair; ++i) row[lane_order<Order>(i)] = source[i];
    for (; i + kPair <= columns.end; i += kPair)
      store_in_lane_order(row + i, load(source + i), load(source + i + kLanes), kOrder);
    for (; i < columns.end; ++i) row[lane_order<Order>(i)] = source[i];
  }

  void tap(int64_t index) {
    if (!forward_.taps[index]) return;
    if (forward_.rounds_taps) tap_as(static_cast<Weight*>(forward_.taps[index]));
    else tap_as(static_cast<float*>(forward_.taps[index]));
    end(kOther);
  }

  template <class Number>
  void tap_as(Number* states) const {
    const Range mine = me_.share(T);
    for (int64_t i = mine.begin * E; i < mine.end * E; ++i) from_float(work_.hidden[i], states[i]);
  }

  void head() const {
    const int64_t V = model_.vocab, N = forward_.num_wanted;
    if (!N) return;
    using Head = typename Form::Head;
    const typename Head::Session session(N);
    matmul(foredraft::matrix<Head>(model_.head, E), me_.share(V, kShareRows),
           Head::inputs(prepared_, normed_, N, E), N, nullptr,
           [&](int64_t token, int64_t row, float value) {
             forward_.logits[token * V + row] = value;
           });
  }

  // Next tokens, a row a thread.
  void draw() {
    if (!forward_.num_draws) return;
    for (int64_t i = me_.index; i < forward_.num_draws; i += me_.size) {
      ForedraftDraw& wanted = forward_.draws[i];
      if (model_.head_ids)
        noise::draw_among(forward_.logits, model_.head_ids, model_.vocab, wanted);
      else
        noise::draw(forward_.logits, model_.vocab, wanted);
    }
    end(kOther);
  }
};

}  // namespace foredraft
