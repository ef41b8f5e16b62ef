// A llama-shaped decoder for a few tokens at a time, on CPU.
//
// One call runs one forward plan through all layers, inside one team of threads. A forward of few
// tokens costs what reading the weights from memory costs, so everything here serves that: weights
// are read once, in the checkpoint's own layout or packed (groups.h), activations stay in caches as
// float32, and threads meet at barriers that take a fraction of a microsecond while each of them has a
// core.
//
// Shape legend: T tokens of the forward, N tokens whose logits are wanted, L layers, E hidden size,
// H query heads, G query heads per key-value head, D head size, F feed-forward width, V vocabulary,
// X experts, P numbers that a layer is told of a token, W those of all layers.
//
// Phases of a layer, a barrier after each; "split" says what the threads share out:
//   qkv         split by weight row     hidden -> normed -> qkv; keys and values -> cache
//   attend      split by tile, chunk    qkv -> query; query, cache -> attended
//   output      split by weight row     hidden += attended . W
// Where entries are latents, more phases make queries of what qkv gives, and a product of each head by
// itself lies before and behind attend (attend_to_latents).
//   gate_up     split by weight row     hidden -> normed; feed_forward = silu(gate) * up
//   down        split by weight row     hidden += feed_forward . W
// Where a part's output is normalised before it is added, that is one more phase, split by token. So
// are keys, where all heads have one norm. In a mixture of experts gate_up is preceded by
//   route       split by weight row     hidden -> normed -> routed
//   choose      split by token          routed -> the experts that each token chooses, by chances
// and down, where they are many, by the inputs of all pairs of a token and an expert, split by pair. An
// expert's weights are read once for all tokens that have chosen it. A token adds up its experts in the
// order of their numbers. What tables and embeddings tell each layer of a token is multiplied at the
// beginning; a layer adds it behind its parts.
// Whatever one core writes and another reads costs a transfer, in a machine of several dies some
// tenths of a microsecond. So each thread normalises few tokens for itself, all of them; many
// tokens are split, with one more barrier.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <vector>

#include "attend.h"
#include "attention_plan.h"
#include "experts.h"
#include "interface.h"
#include "products.h"
#include "recurrent.h"
#include "rows.h"
#include "simd.h"
#include "team.h"
#include "workspace.h"

namespace foredraft {

// One thread's view of a forward. `Weight` is the type of embeddings, and of a cache that is not of
// int8; `Form` that of the other matrices, see products.h.
template <class Weight, class Form>
class Worker {
 public:
  Worker(const ForedraftModel& model, const ForedraftForward& forward,
         const Workspace<Weight, Form>& work, const std::vector<View>& views, Member me)
      : model_(model), forward_(forward), work_(work), views_(views), me_(me),
        clock_(me.index == 0 ? forward.phase_seconds : nullptr) {}

  void run() {
    layers();
    expect({&model_.head, &model_.screen});
    normalise(forward_.num_wanted, forward_.wanted, model_.final_norm, model_.final_norm_bias);
    head();
    end(kHead);
    draw();
  }

 private:
  const ForedraftModel& model_;
  const ForedraftForward& forward_;
  const Workspace<Weight, Form>& work_;
  const std::vector<View>& views_;
  Member me_;
  PhaseClock clock_;
  const typename Form::Session session_{forward_.num_tokens};
  bool in_eight_ = false;  // the activations of the product to come have 8 bits

  const int64_t T = forward_.num_tokens, E = model_.hidden, F = model_.feed_forward;
  const int64_t P = model_.input_size, W = model_.input_width;
  const float residual_scale_ = float(model_.residual_scale);

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
    if (P && forward_.first_layer < forward_.end_layer) project_inputs();
    for (int64_t index = forward_.first_layer; index < forward_.end_layer; ++index) layer(index);
  }

  void layer(int64_t index) {
    const ForedraftLayer& layer = model_.layers[index];
    if (layer.beside) recurrent(*layer.beside);
    if (layer.convolution) recurrent(layer);
    else if (layer.qkv[0].data && model_.latent.rank) attend_to_latents(layer);
    else if (layer.qkv[0].data) attention(layer);
    if (layer.up.data) mlp(index, layer);
    if (layer.input.data) add_told(index, layer);
    tap(index);
  }

  // These matrices are multiplied next, all with the same activations: of 8 bits, where that is
  // wanted and all of them take it.
  void expect(std::initializer_list<const ForedraftMatrix*> matrices) {
    if constexpr (Form::kMayPackExperts || std::is_same_v<Rows, PackedMatrix>)
      in_eight_ = model_.int8_activations && std::all_of(
          matrices.begin(), matrices.end(),
          [](const ForedraftMatrix* one) {
            return !one->data || one->format == kNotPacked || PackedMatrix(*one, 0).takes_eight();
          });
  }

  void attention(const ForedraftLayer& layer) {
    const Heads of(model_, layer.kind);
    expect({layer.qkv, layer.qkv + 1, layer.qkv + 2});
    normalise(T, nullptr, layer.attention_norm, layer.attention_norm_bias,
              layer.beside ? work_.before : work_.hidden);
    if (model_.is_parallel) keep_input();
    qkv(layer, of);
    const int64_t width = of.H * of.D;
    pad(work_.attended, T, width);
    end(kLinear);
    if (layer.key_norm && model_.norms_all_heads) {
      const int64_t num_heads = 2 * of.num_kv;
      const Range mine = me_.share(T * num_heads);
      for (int64_t i = mine.begin; i < mine.end; ++i)
        put_cache(layer, of, i / num_heads, i % num_heads);
      end(kAttention);
    }
    attend(layer);
    end(kAttention);
    expect({&layer.output});
    prepare<Weight>(work_.attended, width);
    add_product(layer.output, layer.output_bias, work_.attended, width, layer.attention_post_norm,
                first_gate(layer));
  }

  void attend_to_latents(const ForedraftLayer& layer) {
    const Heads of(model_, layer.kind);
    const ForedraftLatent& latent = model_.latent;
    const int64_t C = latent.rank, Q = latent.query_rank, N = latent.still, H = of.H, D = of.D;
    const int64_t turned = D - C, width = H * latent.values;
    const auto head_row = [=](int64_t token, int64_t head, int64_t K) {
      return work_.of_heads + (head * T + token) * padded(K);
    };
    const auto low_query = [=](int64_t token) { return work_.attended + token * Q; };
    const auto put_query = [=](int64_t token, int64_t row, float value) {
      const int64_t head = row / (turned + N), i = row % (turned + N) - turned;
      if (i >= 0) head_row(token, head, N)[lane_order<Order>(i)] = value;
      else work_.qkv[token * of.qkv_rows + head * D + turned + i] = value;
    };
    if (pad(work_.of_heads, H * T, N)) end(kOther);
    expect({layer.qkv, layer.qkv + 1});
    normalise(T, nullptr, layer.attention_norm, nullptr);
    const int64_t query_rows = Q ? Q : H * (turned + N);
    qkv_product(layer, [=](int64_t token, int64_t row, float value) {
      if (row >= query_rows) work_.qkv[token * of.qkv_rows + of.query_rows + row - query_rows] = value;
      else if (Q) low_query(token)[row] = value;
      else put_query(token, row, value);
    });
    end(kLinear);
    if (Q) {
      expect({&layer.query});
      normalise(T, nullptr, layer.query_norm, nullptr, low_query(0), Q, kLatentEps);
      matmul(matrix(layer.query, Q), me_.share(H * (turned + N), kShareRows), inputs(normed_, Q), T, nullptr,
             put_query);
      end(kLinear);
    }
    const Range mine = me_.share(T);
    for (int64_t token = mine.begin; token < mine.end; ++token) put_latent(layer, of, token);
    multiply_heads(layer.key_of_head, C, N, [=](int64_t token, int64_t head, int64_t row, float value) {
      work_.qkv[token * of.qkv_rows + head * D + turned + row] = value;
    });
    if (pad(work_.of_heads, H * T, C)) end(kOther);
    attend(layer);
    pad(work_.attended, T, width);
    end(kAttention);
    multiply_heads(layer.value_of_head, latent.values, C,
                   [=](int64_t token, int64_t head, int64_t row, float value) {
                     work_.attended[token * padded(width) + lane_order<Order>(head * latent.values + row)] =
                         value;
                   });
    expect({&layer.output});
    prepare<Order>(work_.attended, width);
    add_product(layer.output, layer.output_bias, work_.attended, width, layer.attention_post_norm,
                first_gate(layer));
  }

  // Finishes a token's entry and writes it into the cache.
  void put_latent(const ForedraftLayer& layer, const Heads& of, int64_t token) const {
    const int64_t C = model_.latent.rank;
    float* const entry = work_.qkv + token * of.qkv_rows + of.query_rows;
    float* const latent = entry + of.D - C;
    const float scale = inverse_rms(latent, C, kLatentEps);
    for (int64_t i = 0; i < C; ++i) latent[i] = layer.key_norm[i] * (latent[i] * scale);
    work_.rotate(model_, layer, token, entry);
    with_entries([&](auto number) {
      const auto entries = cache_layer<decltype(number)>(forward_, layer, of.D, true);
      put_entry(entry, of.D, entries.entries(forward_.tables[token], 0).at(forward_.entries[token]));
    });
  }

  // Products of `of_heads` [H, T, K] with a matrix [rows, K] of each head: put(token, head, row, value).
  template <class Put>
  void multiply_heads(const ForedraftMatrix& all, int64_t rows, int64_t K, const Put& put) {
    const int64_t H = model_.num_heads;
    expect({&all});
    const auto inputs_of_head = [&](int64_t head, Range tokens) {
      const float* const from = work_.of_heads + head * T * padded(K);
      const Inputs x = inputs_of(work_.head_inputs + head * work_.head_size, from, T, K);
      Form::template prepare<Order>(x, from, tokens);
      return x;
    };
    if (Form::kPrepares) {
      const Range mine = me_.share(H * T);
      for (int64_t head = mine.begin / T; head * T < mine.end; ++head)
        inputs_of_head(head, {std::max(mine.begin - head * T, int64_t(0)), std::min(mine.end - head * T, T)});
      end(kLinear);
    }
    for (int64_t head = 0; head < H; ++head)
      matmul(matrix(all, K, head), me_.share(rows, kShareRows), inputs_of_head(head, {0, 0}), T, nullptr,
             [&](int64_t token, int64_t row, float value) { put(token, head, row, value); });
    end(kLinear);
  }

  void keep_input() const {
    const Range mine = me_.share(T);
    std::copy(work_.hidden + mine.begin * E, work_.hidden + mine.end * E, work_.before + mine.begin * E);
  }

  // Zeros behind rows, before they are filled: others have left some of another width. Whether there are
  // such.
  bool pad(float* rows, int64_t count, int64_t width) const {
    const Range mine = me_.share(count);
    for (int64_t i = mine.begin; width % kPair && i < mine.end; ++i) pad_with_zeros(rows, i, width);
    return width % kPair;
  }

  void recurrent(const ForedraftLayer& layer) {
    const RecurrentLayer<Weight> part{model_, forward_, layer, work_.qkv, work_.gates, work_.attended};
    expect({layer.qkv, layer.qkv + 1});
    normalise(T, nullptr, layer.attention_norm, layer.attention_norm_bias);
    if (model_.keeps_inputs) keep_input();
    qkv_product(layer, [&](int64_t token, int64_t row, float value) {
      work_.qkv[token * part.width() + row] = value;
    });
    if (layer.gates)
      matmul(Matrix<Order>{static_cast<const Order*>(layer.gates), E}, me_.share(part.gate_rows()),
             Activations{normed_, padded(E)}, T, nullptr, [&](int64_t token, int64_t row, float value) {
               work_.gates[token * part.gate_rows() + row] = value;
             });
    pad(work_.attended, T, part.num_outputs());
    end(kLinear);
    if (layer.gates) {
      part.convolve(me_);
      end(kAttention);
    }
    part.mix(me_);
    end(kAttention);
    if (part.norms_all()) {
      part.finish(me_);
      end(kAttention);
    }
    expect({&layer.output});
    prepare<Weight>(work_.attended, part.num_outputs());
    add_product(layer.output, nullptr, work_.attended, part.num_outputs(), layer.attention_post_norm,
                first_gate(layer));
  }

  // The input projection, each part of it split by weight row.
  template <class Put>
  void qkv_product(const ForedraftLayer& layer, const Put& put) const {
    const float* const bias = layer.qkv_bias;
    int64_t first = 0;  // row of a part
    for (int i = 0; i < 2 && layer.qkv_rows[i]; first += layer.qkv_rows[i++])
      matmul(matrix(layer.qkv[i], E), me_.share(layer.qkv_rows[i], kShareRows), inputs(normed_, E), T,
             nullptr, [&](int64_t token, int64_t row, float value) {
               put(token, first + row, bias ? value + bias[first + row] : value);
             });
  }

  void mlp(int64_t index, const ForedraftLayer& layer) {
    if (layer.router) {
      if constexpr (Form::kMayPackExperts)
        if (layer.up.format != kNotPacked) return mixture<Packed<false>>(layer);
      return mixture<Form>(layer);
    }
    put_gated(layer);
    add_product(layer.down, layer.down_bias, work_.feed_forward, layer.feed_forward, layer.mlp_post_norm,
                first_of_layer(index + 1), factor_behind_mlp(layer));
  }

  static float factor_behind_mlp(const ForedraftLayer& layer) {
    return layer.input.data ? 1.0f : float(layer.factor);
  }

  // Inputs of the product with `down` of a part that all tokens read.
  void put_gated(const ForedraftLayer& layer) {
    normalise_for_mlp(layer, layer.mlp_norm);
    if (pad(work_.feed_forward, T, layer.feed_forward)) end(kOther);
    gate_up<Form>(layer, 0, inputs(normed_, E), T, work_.feed_forward);
    end(kLinear);
    expect({&layer.down});
    prepare<Order>(work_.feed_forward, layer.feed_forward);
  }

  template <class Own = Form>
  void normalise_for_mlp(const ForedraftLayer& layer, const float* norm) {
    expect({&layer.gate, &layer.up});
    normalise<Own>(T, nullptr, norm, layer.mlp_norm_bias, model_.is_parallel ? work_.before : work_.hidden);
  }

  // What the part beside experts gives, normalised, in `before`; `added` is then for what experts give.
  void put_dense(const ForedraftLayer& layer) {
    put_gated(layer);
    float* const added = work_.added;
    const int64_t width = E;
    matmul(matrix(layer.down, layer.feed_forward), me_.share(E, kShareRows),
           inputs(work_.feed_forward, layer.feed_forward), T, nullptr,
           [=](int64_t token, int64_t row, float value) { added[token * width + row] = value; });
    end(kLinear);
    const Range mine = me_.share(T);
    for (int64_t at = mine.begin * E; at < mine.end * E; at += E) {
      const float inverse = inverse_rms(added + at, E, model_.norm_eps);
      for (int64_t i = 0; i < E; ++i)
        work_.before[at + i] = layer.mlp_post_norm[i] * (added[at + i] * inverse);
      std::fill_n(added + at, E, 0.0f);
    }
    end(kOther);
  }

  // Adds both parts, each normalised, once their sum is.
  void add_both(const ForedraftLayer& layer) {
    const Range mine = me_.share(T);
    for (int64_t at = mine.begin * E; at < mine.end * E; at += E) {
      float* const both = work_.before + at;
      const float of_experts = inverse_rms(work_.added + at, E, model_.norm_eps);
      for (int64_t i = 0; i < E; ++i)
        both[i] += layer.experts_post_norm[i] * (work_.added[at + i] * of_experts);
      const float inverse = inverse_rms(both, E, model_.norm_eps);
      for (int64_t i = 0; i < E; ++i)
        work_.hidden[at + i] = (work_.hidden[at + i] + layer.mlp_post_norm[i] * (both[i] * inverse)) *
                               factor_behind_mlp(layer);
    }
    end(kOther);
  }

  // What layers are told of tokens: by the tables, and by their embeddings.
  void project_inputs() {
    const Range layers{forward_.first_layer, forward_.end_layer}, mine = me_.share(T);
    expect({&model_.layers[layers.begin].input});
    normalise(T, nullptr, nullptr, nullptr, work_.before);
    for (int64_t index = layers.begin; index < layers.end; ++index)
      matmul(matrix(model_.layers[index].input, E), me_.share(P, kShareRows), inputs(normed_, E), T, nullptr,
             [&](int64_t token, int64_t row, float value) {
               work_.projected[token * W + index * P + row] = value;
             });
    end(kLinear);
    // They are scaled by 1 / root of E before their norm: so is its epsilon.
    const double eps = model_.norm_eps * double(E);
    const float of_table = std::sqrt(float(P)), of_both = std::sqrt(0.5f);
    for (int64_t t = mine.begin; t < mine.end; ++t)
      for (int64_t at = t * W + layers.begin * P; at < t * W + layers.end * P; at += P) {
        const float inverse = inverse_rms(work_.projected + at, P, eps);
        for (int64_t i = 0; i < P; ++i) {
          const float projected = model_.input_norm[i] * (work_.projected[at + i] * inverse);
          work_.told[at + i] = (projected + work_.told[at + i] * of_table) * of_both;
        }
      }
    end(kOther);
  }

  // Adds what a layer is told of tokens, as much of it as hidden states want.
  void add_told(int64_t index, const ForedraftLayer& layer) {
    if (pad(work_.feed_forward, T, P)) end(kOther);
    expect({&layer.input_gate});
    normalise(T, nullptr, nullptr, nullptr);
    const void* const next = matrix(layer.input_output, P).at(me_.share(E, kShareRows).begin);
    matmul(matrix(layer.input_gate, E), me_.share(P, kShareRows), inputs(normed_, E), T, next,
           [&](int64_t token, int64_t row, float value) {
             const float gate = activated(broadcast(value), layer)[0];
             work_.feed_forward[token * padded(P) + lane_order<Order>(row)] =
                 gate * work_.told[token * W + index * P + row];
           });
    end(kLinear);
    expect({&layer.input_output});
    prepare<Order>(work_.feed_forward, P);
    add_product(layer.input_output, nullptr, work_.feed_forward, P, layer.input_norm,
                first_of_layer(index + 1), float(layer.factor));
  }

  using Rows = typename Form::Rows;
  using Inputs = typename Form::Inputs;
  using Order = typename Form::Order;  // of normed and feed_forward rows
  static constexpr const Order* kOrder = nullptr;  // names the type
  static constexpr int64_t kShareRows = Form::kShareRows;

  template <class Own = Form>
  static typename Own::Rows matrix(const ForedraftMatrix& all, int64_t K, int64_t expert = 0) {
    const char* const data = static_cast<const char*>(all.data) + expert * all.step;
    return Own::rows({data, all.format, 0}, K);
  }

  // Where this thread's share of a coming product begins: prefetched at the end of the one before,
  // memory goes on giving while threads wait for each other.
  const void* first_gate(const ForedraftLayer& layer) const {
    const ForedraftMatrix& first = layer.gate.data ? layer.gate : layer.up;
    if (layer.router || !first.data) return nullptr;
    return matrix(first, E).at(me_.share(layer.feed_forward, kShareRows).begin);
  }

  const void* first_of_layer(int64_t index) const {
    if (index == forward_.end_layer)
      return matrix(scored_head(), E).at(me_.share(num_scored(), kShareRows).begin);
    const ForedraftLayer& layer = model_.layers[index];
    if (!layer.qkv[0].data) return first_gate(layer);
    int64_t row = layer.convolution || model_.latent.rank
                      ? me_.share(layer.qkv_rows[0], kShareRows).begin
                      : first_qkv_row(me_.index, layer, {model_, layer.kind});
    int part = 0;
    while (part < 2 && layer.qkv_rows[part + 1] && row >= layer.qkv_rows[part])
      row -= layer.qkv_rows[part++];
    return matrix(layer.qkv[part], E).at(row);
  }

  // Rows of K floats as products read them.
  Inputs inputs(const float* rows, int64_t K) const { return inputs_of(prepared_, rows, T, K); }
  Inputs inputs_of(float* memory, const float* rows, int64_t count, int64_t K) const {
    return Form::inputs(memory, rows, count, K, in_eight_);
  }

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

  // Token embeddings or given states, rotary angles, and the tables that tell layers of tokens.
  void embed() const {
    const Range mine = me_.share(T);
    for (int64_t t = mine.begin; t < mine.end; ++t) {
      float* const to = work_.hidden + t * E;
      if (forward_.hidden) std::copy_n(forward_.hidden + t * E, E, to);
      else put_embedding(forward_.token_ids[t], to);
      for (int64_t rope = 0; rope < model_.num_ropes; ++rope) put_angles(rope, t);
      if (!P) continue;
      put_embedding(forward_.token_ids[t], work_.before + t * E);
      put_row(model_.inputs, forward_.token_ids[t], W, work_.told + t * W);
    }
  }

  void put_angles(int64_t rope, int64_t token) const {
    const float* const inv_freq = model_.inv_freq + rope * work_.rope_pairs;
    const float amplitude = model_.amplitudes[rope];
    const int64_t at = (rope * T + token) * work_.rope_pairs;
    for (int64_t i = 0; i < model_.rope_sizes[rope] / 2; ++i) {
      const float angle = float(forward_.positions[token]) * inv_freq[i];
      work_.cosine[at + i] = std::cos(angle) * amplitude;
      work_.sine[at + i] = std::sin(angle) * amplitude;
    }
  }

  void put_embedding(int64_t token, float* to) const {
    put_row(model_.embedding, token, E, to);
    const float scale = float(model_.embedding_scale);
    for (int64_t i = 0; i < E; ++i) to[i] *= scale;
  }

  // A row of a table.
  static void put_row(const ForedraftMatrix& table, int64_t row, int64_t K, float* to) {
    const Weight* const source = static_cast<const Weight*>(table.data) + row * K;
    if (table.format != kNotPacked) PackedMatrix(table, K).unpack(row, to);
    else for (int64_t i = 0; i < K; ++i) to[i] = to_float(source[i]);
  }

  // Normalised hidden states in lane order, of all tokens or of those listed, and inputs of them.
  // Without a weight they stay as they are. `Own` is the form of the matrices that read them.
  void normalise(int64_t count, const int32_t* tokens, const float* weight, const float* bias) {
    normalise(count, tokens, weight, bias, work_.hidden);
  }

  template <class Own = Form>
  void normalise(int64_t count, const int32_t* tokens, const float* weight, const float* bias,
                 const float* from) {
    normalise<Own>(count, tokens, weight, bias, from, E, model_.norm_eps);
  }

  // The same of rows of K numbers.
  template <class Own = Form>
  void normalise(int64_t count, const int32_t* tokens, const float* weight, const float* bias,
                 const float* from, int64_t K, double eps) {
    const Range mine = to_prepare(count);
    for (int64_t i = mine.begin; i < mine.end; ++i) {
      const float* x = from + (tokens ? tokens[i] : i) * K;
      const float mean = model_.layer_norms ? mean_of(x, K) : 0.0f;
      const Vec means = broadcast(mean);
      const Vec scale = broadcast(weight ? inverse_rms(x, K, eps, mean) : 1.0f);
      float* row = normed_ + i * padded(K);
      const auto vector = [&](int64_t k) INLINE {
        if (!weight) return load(x + k);
        const Vec scaled = load(weight + k) * ((load(x + k) - means) * scale);
        return bias ? scaled + load(bias + k) : scaled;
      };
      int64_t k = 0;
      for (; k + kPair <= K; k += kPair)
        store_in_lane_order(row + k, vector(k), vector(k + kLanes), kOrder);
      pad_with_zeros(normed_, i, K);
      for (; k < K; ++k)
        row[lane_order<Order>(k)] =
            weight ? weight[k] * ((x[k] - mean) * scale[0]) + (bias ? bias[k] : 0.0f) : x[k];
    }
    Own::template prepare<Order>(Own::inputs(prepared_, normed_, count, K, in_eight_), normed_, mine);
    end_prepare(kOther);
  }

  // Where the weight rows of a thread begin. Keys and values are dealt out in whole heads, so that
  // who computes one can finish it.
  int64_t first_qkv_row(int thread, const ForedraftLayer& layer, const Heads& of) const {
    const int64_t count = layer.is_reader ? of.query_rows : of.qkv_rows, D = of.D;
    if (thread == me_.size) return count;
    const int64_t begin = Member{me_.barrier, thread, me_.size}.share(count, kShareRows).begin;
    if (begin <= of.query_rows) return begin;
    if (kShareRows == kGroupRows && D % kGroupRows) return of.query_rows / kGroupRows * kGroupRows;
    return of.query_rows + (begin - of.query_rows + D / 2) / D * D;
  }

  void qkv(const ForedraftLayer& layer, const Heads& of) const {
    const float* bias = layer.qkv_bias;
    const Range mine{first_qkv_row(me_.index, layer, of), first_qkv_row(me_.index + 1, layer, of)};
    const void* const next = matrix(layer.output, of.H * of.D).at(me_.share(E, kShareRows).begin);
    int64_t first = 0;  // row of a part
    for (int part = 0; part < 3 && layer.qkv_rows[part]; first += layer.qkv_rows[part++]) {
      const Range rows{std::max(mine.begin - first, int64_t(0)),
                       std::min(mine.end - first, layer.qkv_rows[part])};
      matmul(matrix(layer.qkv[part], E), rows, inputs(normed_, E), T, next,
             [&](int64_t token, int64_t part_row, float value) {
               const int64_t row = first + part_row;
               work_.qkv[token * of.qkv_rows + row] = bias ? value + bias[row] : value;
             });
    }
    if (layer.key_norm && model_.norms_all_heads) return;  // all keys are needed first
    const int64_t begin = ceil_div(std::max(mine.begin, of.query_rows), of.D), end = mine.end / of.D;
    for (int64_t head = begin; head < end; ++head)
      for (int64_t token = 0; token < T; ++token)
        put_cache(layer, of, token, head - of.query_rows / of.D);
  }

  // Finishes a key head, or a value head behind those, and writes it into the cache.
  void put_cache(const ForedraftLayer& layer, const Heads& of, int64_t token, int64_t kv_head) const {
    const float* const heads = work_.qkv + token * of.qkv_rows + of.query_rows;
    const int64_t D = of.D;
    const float* const source = heads + kv_head * D;
    const bool is_key = kv_head < of.num_kv;
    float* x = work_.attention + me_.index * work_.attention_size;  // room for one
    std::copy(source, source + D, x);
    if (is_key) {
      const HeadNorm norm(model_, D, layer.key_norm, heads, of.num_kv);
      if (!model_.norms_rotated) norm.apply(x, kv_head);
      work_.rotate(model_, layer, token, x);
      if (model_.norms_rotated) norm.apply(x, kv_head);
    } else if (layer.value_norm) {
      const float scale = inverse_rms(x, D, model_.norm_eps);
      for (int64_t i = 0; i < D; ++i) x[i] = layer.value_norm[i] * (x[i] * scale);
    }
    with_entries([&](auto number) {
      const auto entries = cache_layer<decltype(number)>(forward_, layer, D, is_key);
      put_entry(x, D, entries.entries(forward_.tables[token], kv_head % of.num_kv)
                          .at(forward_.entries[token]));
    });
  }

  // Calls work(a number of the type that cache entries are of).
  template <class Work>
  void with_entries(const Work& work) const {
    if (forward_.int8_entries) work(int8_t{});
    else work(Weight{});
  }

  void attend(const ForedraftLayer& layer) {
    const View& view = views_[size_t(layer.view)];
    with_entries([&](auto number) {
      AttentionPhase<Weight, Form, decltype(number)>{model_, forward_, work_, view, me_, layer}.run();
    });
    if constexpr (Form::kAttendsOnTiles) session_.resume();
  }

  // hidden += x . W (+ bias), perhaps normalised before; then all of it times a factor
  void add_product(const ForedraftMatrix& weights, const float* bias, const float* x, int64_t K,
                   const float* post_norm, const void* next, float factor = 1) {
    const auto product = [&](const auto& put) {
      matmul(matrix(weights, K), me_.share(E, kShareRows), inputs(x, K), T, next, put);
      end(kLinear);
    };
    const float scale = residual_scale_;  // here, and not in memory that is written to
    float *const hidden = work_.hidden, *const added = work_.added;
    const int64_t width = E;
    if (!post_norm)
      return product([=](int64_t token, int64_t row, float value) {
        hidden[token * width + row] += (bias ? value + bias[row] : value) * scale;
      });
    product([=](int64_t token, int64_t row, float value) {
      added[token * width + row] = bias ? value + bias[row] : value;
    });
    const Range mine = me_.share(T);
    for (int64_t t = mine.begin; t < mine.end; ++t) {
      const float* const row = added + t * E;
      const float inverse = inverse_rms(row, E, model_.norm_eps);
      for (int64_t i = 0; i < E; ++i)
        hidden[t * E + i] = (hidden[t * E + i] + post_norm[i] * (row[i] * inverse) * scale) * factor;
    }
    end(kOther);
  }

  // ---- experts ----------------------------------------------------------------------------------

  // `Own` is the form of the experts. Inputs of all tokens are made once, and gathered for each expert
  // whose weights not all of them read. Those of `down` are shared out, too, unless they are few.
  template <class Own>
  void mixture(const ForedraftLayer& layer) {
    if (layer.dense) put_dense(*layer.dense);
    float* const sums = layer.dense ? work_.added : work_.hidden;
    normalise_for_mlp<Own>(layer, layer.dense ? layer.router_norm : layer.mlp_norm);
    const int64_t X = model_.num_experts, num_logits = X - model_.shared_experts + model_.shared_gate;
    const int64_t each = model_.chosen_experts;
    matmul(Matrix<Order>{static_cast<const Order*>(layer.router), E}, me_.share(num_logits),
           Activations{normed_, padded(E)}, T, nullptr,
           [&](int64_t token, int64_t row, float value) { work_.routed[token * X + row] = value; });
    end(kLinear);
    const Range mine = me_.share(T);
    for (int64_t token = mine.begin; token < mine.end; ++token) choose(layer, token);
    pad(work_.feed_forward, T * each, F);
    end(kOther);
    if (layer.dense) normalise_for_mlp<Own>(layer, layer.mlp_norm);
    const Chosen chosen(work_.chosen, T, X, each);
    float* const memory = work_.gathered + me_.index * work_.gathered_size;
    const typename Own::Inputs all = Own::inputs(prepared_, normed_, T, E, in_eight_);
    chosen.each([&](int64_t expert, const int32_t* pairs, int64_t first, int64_t count) {
      const typename Own::Session session(count);
      const auto token_of = [=](int64_t i) { return pairs[i] / each; };
      gate_up<Own>(layer, expert, count == T ? all : Own::gather(memory, all, count, token_of), count,
                   work_.feed_forward + first * padded(F));
    });
    end(kLinear);
    expect({&layer.down});
    // Inputs of `down` of an expert's pairs, of which some are prepared here.
    const bool are_few = T * each <= kFewTokens;
    const auto of_pairs = [&](int64_t first, int64_t count, Range some) {
      const float* const rows = work_.feed_forward + first * padded(F);
      float* const to = are_few ? memory : work_.pairs + first * work_.pair_size;
      const typename Own::Inputs x = Own::inputs(to, rows, count, F, in_eight_);
      Own::template prepare<Order>(x, rows, some);
      return x;
    };
    if (Own::kPrepares && !are_few) {
      const Range some = me_.share(T * each);
      chosen.each([&](int64_t, const int32_t*, int64_t first, int64_t count) {
        const auto within = [&](int64_t pair) { return std::clamp<int64_t>(pair - first, 0, count); };
        of_pairs(first, count, {within(some.begin), within(some.end)});
      });
      end(kLinear);
    }
    chosen.each([&](int64_t expert, const int32_t* pairs, int64_t first, int64_t count) {
      const typename Own::Session session(count);
      const float* const bias = layer.down_bias ? layer.down_bias + expert * E : nullptr;
      const typename Own::Inputs x = of_pairs(first, count, {0, are_few ? count : 0});
      matmul(matrix<Own>(layer.down, F, expert), me_.share(E, Own::kShareRows), x, count, nullptr,
             [&](int64_t i, int64_t row, float value) {
               const float chance = work_.chances[pairs[i]];
               sums[pairs[i] / each * E + row] +=
                   (bias ? value + bias[row] : value) * chance * residual_scale_;
             });
    });
    session_.resume();
    end(kLinear);
    if (layer.dense) add_both(layer);
  }

  // The experts of a token and their chances, in the order of their numbers. Of equal ones the first.
  void choose(const ForedraftLayer& layer, int64_t token) const {
    const int64_t num_shared = model_.shared_experts;
    const int64_t X = model_.num_experts - num_shared, K = model_.chosen_experts - num_shared;
    float* const logits = work_.routed + token * model_.num_experts;
    const float all = weigh_experts(layer, logits, X);
    float* const chances = work_.chances + token * model_.chosen_experts;
    int32_t* const chosen = reinterpret_cast<int32_t*>(work_.chosen) + token * model_.chosen_experts;
    const float* const bias = model_.sigmoid_chances ? layer.router_bias : nullptr;
    const auto rank = [&](int64_t x) { return bias ? logits[x] + bias[x] : logits[x]; };
    const uint64_t groups = best_groups(X, rank);
    const auto may_be = [&](int64_t x) { return groups >> (x * model_.expert_groups / X) & 1; };
    float of_chosen = 0;
    for (int64_t k = 0; k < K; ++k) {
      int64_t best = -1;
      for (int64_t x = 0; x < X; ++x) {
        const bool is_taken = std::find(chosen, chosen + k, int32_t(x)) != chosen + k;
        if (!is_taken && may_be(x) && (best < 0 || rank(x) > rank(best))) best = x;
      }
      chosen[k] = int32_t(best);
      of_chosen += logits[best];
    }
    std::sort(chosen, chosen + K);
    const float whole = model_.normalises_chances ? of_chosen + float(model_.chance_floor) : all;
    for (int64_t k = 0; k < K; ++k) {
      chances[k] = logits[chosen[k]] / whole * float(model_.chance_scale);
      if (layer.expert_factors) chances[k] *= layer.expert_factors[chosen[k]];
    }
    for (int64_t i = 0; i < num_shared; ++i) {
      chosen[K + i] = int32_t(X + i);
      chances[K + i] = model_.shared_gate ? 1.0f / (1.0f + std::exp(-logits[X])) : 1.0f;
    }
  }

  // The bits of those groups of experts whose best ones rank highest together: two, where chances are
  // sigmoids, else one. Of equal groups the first.
  template <class Rank>
  uint64_t best_groups(int64_t X, const Rank& rank) const {
    const int64_t groups = model_.expert_groups, each = X / groups;
    constexpr float kNone = -std::numeric_limits<float>::infinity();
    uint64_t taken = 0;
    for (int64_t k = 0; k < model_.chosen_groups; ++k) {
      int64_t best = -1;
      float most = kNone;
      for (int64_t g = 0; g < groups; ++g) {
        if (taken >> g & 1) continue;
        float first = kNone, second = kNone;
        for (int64_t x = g * each; x < (g + 1) * each; ++x) {
          second = std::max(second, std::min(first, rank(x)));
          first = std::max(first, rank(x));
        }
        const float both = model_.sigmoid_chances && groups > 1 ? first + second : first;
        if (best < 0 || both > most) best = g, most = both;
      }
      taken |= uint64_t{1} << best;
    }
    return taken;
  }

  // Logits become chances; returns by what they are still to be divided.
  float weigh_experts(const ForedraftLayer& layer, float* logits, int64_t X) const {
    if (model_.sigmoid_chances) {
      for (int64_t x = 0; x < X; ++x) logits[x] = 1.0f / (1.0f + std::exp(-logits[x]));
      return 1.0f;
    }
    for (int64_t x = 0; layer.router_bias && x < X; ++x) logits[x] += layer.router_bias[x];
    const float most = *std::max_element(logits, logits + X);
    float all = 0;
    for (int64_t x = 0; x < X; ++x) all += logits[x] = std::exp(logits[x] - most);
    return all;
  }

  // ---- feed-forward -----------------------------------------------------------------------------

  // Gate and up rows go to scratch, some panels of them, before their product goes to feed_forward
  // in one stream. Lines of memory that another core has read are slow to write one by one.
  template <class Own>
  void gate_up(const ForedraftLayer& layer, int64_t expert, const typename Own::Inputs& x, int64_t count,
               float* out) const {
    const int64_t F = layer.feed_forward;
    const bool is_gated = layer.gate.data;
    const auto up = matrix<Own>(layer.up, E, expert), down = matrix<Own>(layer.down, F, expert);
    const auto gate = is_gated ? matrix<Own>(layer.gate, E, expert) : up;
    const auto bias_of = [&](const float* bias) { return bias ? bias + expert * 2 * F : nullptr; };
    const float *const gate_bias = bias_of(layer.gate_bias), *const up_bias = bias_of(layer.up_bias);
    const int64_t stride = work_.gate_up_rows;
    float* gates = work_.gate_up + me_.index * work_.gate_up_size;
    float* ups = gates + count * stride;
    const Range mine = me_.share(F, Own::kShareRows);
    const void* const next = down.at(me_.share(E, Own::kShareRows).begin);
    const int64_t step = std::min(panel_rows(gate, count), stride);
    int64_t first = mine.begin;  // of the rows in scratch
    for (int64_t begin = mine.begin; begin < mine.end; begin += step) {
      const Range rows{begin, std::min(begin + step, mine.end)};
      const bool is_last = rows.end == mine.end;
      const auto into = [&](float* scratch) {
        return [=](int64_t token, int64_t row, float value) {
          scratch[token * stride + row - first] = value;
        };
      };
      if (is_gated) all_tokens(gate, rows, x, count, is_last ? next : gate.at(rows.end), into(gates));
      all_tokens(up, rows, x, count, up.at(is_last ? rows.begin : rows.end), into(ups));
      if (!is_last && rows.end - first + step <= stride) continue;
      for (int64_t i = 0; i < count; ++i) {
        add_bias({first, rows.end}, gate_bias, gates + i * stride);
        add_bias({first, rows.end}, up_bias, ups + i * stride);
        put_feed_forward({first, rows.end}, layer, gates + i * stride, ups + i * stride,
                         out + i * padded(F));
      }
      first = rows.end;
    }
  }

  static void add_bias(Range columns, const float* bias, float* values) {
    for (int64_t i = columns.begin; bias && i < columns.end; ++i) values[i - columns.begin] += bias[i];
  }

  // silu(gate) * up of some columns. The scratch rows have room for whole vectors.
  void put_feed_forward(Range columns, const ForedraftLayer& layer, float* gates, const float* ups,
                        float* row) const {
    const bool is_gated = layer.gate.data;
    const int64_t count = columns.end - columns.begin;
    const auto activate = [&](const auto& activation) {
      for (int64_t i = 0; i < count; i += kLanes)
        store(gates + i, is_gated ? activation(load(gates + i)) * load(ups + i) : activation(load(ups + i)));
    };
    if (model_.activation == kClippedSilu)
      for (int64_t i = 0; i < count; i += kLanes)
        store(gates + i, clipped_silu(load(gates + i), load(ups + i)));
    else if (model_.activation == kSilu) activate([](Vec x) { return silu(x); });
    else if (model_.activation == kXielu) activate([&](Vec x) { return xielu(x, layer.activation); });
    else if (model_.activation == kRelu2) activate([](Vec x) { return relu2(x); });
    else activate([](Vec x) { return gelu_tanh(x); });
    const float* source = gates - columns.begin;
    int64_t i = columns.begin;
    for (; i < columns.end && i % kPair; ++i) row[lane_order<Order>(i)] = source[i];
    for (; i + kPair <= columns.end; i += kPair)
      store_in_lane_order(row + i, load(source + i), load(source + i + kLanes), kOrder);
    for (; i < columns.end; ++i) row[lane_order<Order>(i)] = source[i];
  }

  Vec activated(Vec x, const ForedraftLayer& layer) const {
    if (model_.activation == kSilu) return silu(x);
    if (model_.activation == kXielu) return xielu(x, layer.activation);
    return model_.activation == kRelu2 ? relu2(x) : gelu_tanh(x);
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

  const ForedraftMatrix& scored_head() const { return model_.screen.data ? model_.screen : model_.head; }
  int64_t num_scored() const { return forward_.num_first ? forward_.num_first : model_.vocab; }

  void head() const {
    const int64_t N = forward_.num_wanted;
    if (!N) return;
    const typename Form::Session session(N);
    const Range mine = me_.share(num_scored(), kShareRows);
    matmul(matrix(scored_head(), E), mine, inputs_of(prepared_, normed_, N, E), N, nullptr,
           [this](int64_t token, int64_t row, float value) { *logit(token, row) = value; });
    for (int64_t token = 0; token < N; ++token) finish_logits(token, mine);
  }

  float* logit(int64_t token, int64_t row) const {
    return forward_.logits + token * (num_scored() + forward_.num_others) + row;
  }

  void finish_logits(int64_t token, Range rows) const {
    finish_some(logit(token, rows.begin), rows);
  }

  void finish_some(float* logits, Range rows) const {
    const int64_t count = rows.end - rows.begin;
    const bool is_plain = model_.logits_scale == 1 && model_.logits_cap == 0;
    for (int64_t i = 0; i < count && !is_plain; i += kLanes)
      finish(logits + i, std::min<int64_t>(kLanes, count - i));
    for (int64_t i = std::max(rows.begin, model_.num_ids); i < rows.end; ++i)
      logits[i - rows.begin] = -std::numeric_limits<float>::infinity();
  }

  // Up to a vector of logits, scaled and capped.
  void finish(float* logits, int64_t count) const {
    Vec some{};
    std::memcpy(&some, logits, size_t(count) * sizeof(float));
    some *= float(model_.logits_scale);
    if (model_.logits_cap != 0) some = capped(some, float(model_.logits_cap));
    std::memcpy(logits, &some, size_t(count) * sizeof(float));
  }

  // Next tokens, a row a thread.
  void draw() {
    if (!forward_.num_draws) return;
    for (int64_t i = me_.index; i < forward_.num_draws; i += me_.size) {
      if (model_.screen.data) draw_screened(forward_.draws[i], forward_.others + i * forward_.num_others);
      else noise::draw(forward_.logits, num_scored(), forward_.draws[i]);
    }
    end(kOther);
  }

  // The logits of the tokens that may win, and of their neighbours, become those of the head itself.
  void draw_screened(ForedraftDraw& wanted, const int32_t* others_of) const {
    if constexpr (std::is_same_v<Rows, PackedMatrix>) {
      int64_t tokens[noise::kMostOthers + noise::kMostHopeful];
      float logits[noise::kMostOthers + noise::kMostHopeful];
      const int64_t others = std::find(others_of, others_of + forward_.num_others, -1) - others_of;
      std::copy_n(others_of, others, tokens);
      const int64_t hopeful = noise::find_hopeful(logit(wanted.row, 0), num_scored(), wanted, tokens + others);
      const int64_t count = hopeful ? others + hopeful : 0;
      const Rows rows = matrix(model_.head, E);
      const Inputs x = inputs_of(prepared_, normed_, forward_.num_wanted, E);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t begin = tokens[i] / kGroupRows * kGroupRows;
        const Range group{begin, std::min(begin + kGroupRows, model_.vocab)};
        float of_group[kGroupRows];
        some_groups<1>(rows.products(x).in_vectors[0], rows, begin, group.end - begin, x, wanted.row,
                       {wanted.row, wanted.row + 1}, 0,
                       [&](int64_t, int64_t row, float value) { of_group[row - begin] = value; });
        finish_some(of_group, group);
        logits[i] = of_group[tokens[i] - begin];
        if (i >= others) std::copy_n(of_group, std::min(group.end, num_scored()) - begin, logit(wanted.row, begin));
      }
      float* const named = logit(wanted.row, num_scored());
      std::fill_n(named, forward_.num_others, -std::numeric_limits<float>::infinity());
      std::copy_n(logits, count ? others : 0, named);
      noise::draw_among(logits, tokens, count, wanted);
    }
  }
};

}  // namespace foredraft
