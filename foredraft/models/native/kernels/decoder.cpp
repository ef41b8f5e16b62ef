// A llama-shaped decoder for a few tokens at a time, on CPU.
//
// One call runs one forward plan through all layers, inside one team of threads. A forward of few
// tokens costs what reading the weights from memory costs, so everything here serves that: weights
// are read once, in the checkpoint's own layout and type, activations stay in caches as float32,
// and threads meet at spinning barriers that take a fraction of a microsecond.
//
// Shape legend: T tokens of the forward, N tokens whose logits are wanted, L layers, E hidden size,
// H query heads, G query heads per key-value head, S cache slots, C cache entries of a slot, D head
// size, F feed-forward width, V vocabulary.
//
// Phases of a layer, a barrier after each; "split" says what the threads share out:
//   normalise   split by token          hidden -> normed
//   qkv         split by weight row     normed -> qkv
//   rotate      split by token          head norms, rotary embedding; keys and values -> cache
//   attend      split by token tile     query, cache -> attended
//   output      split by weight row     hidden += attended . W
//   normalise   split by token
//   gate_up     split by weight row     feed_forward = silu(gate) * up
//   down        split by weight row     hidden += feed_forward . W
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("ira-algorithm=priority")  // spills fewer of dot_block's running sums
#endif

#include <omp.h>

#include <cmath>
#include <vector>

#include "attention.h"
#include "interface.h"
#include "matmul.h"
#include "pages.h"
#include "simd.h"
#include "team.h"

using namespace foredraft;

namespace {

constexpr int64_t kTileTokens = 16;

// The work buffers of one forward, one after another in the caller's workspace. Rows in lane order
// are padded to whole pairs.
struct Workspace {
  int64_t size = 0;  // floats

  float *hidden, *normed, *qkv, *cosine, *sine, *query, *attended, *feed_forward, *wanted;
  float *scores, *gate_up;           // per thread
  int64_t scores_size, gate_up_size; // floats per thread
  int64_t score_stride, tile_queries;

  Workspace(const ForedraftModel& model, int64_t num_tokens, int64_t num_wanted,
            int64_t max_entries, int64_t num_threads, float* memory) {
    const auto take = [&](float*& buffer, int64_t count) {
      buffer = memory + size;
      size += (count + 15) / 16 * 16;
    };
    const int64_t T = num_tokens, E = model.hidden, D = model.head_dim;
    const int64_t H = model.num_heads, G = H / model.num_kv_heads;
    score_stride = padded(max_entries) + kPair;  // not a power of two: rows spread over cache sets
    tile_queries = std::min(T, kTileTokens) * G;
    scores_size = tile_queries * (score_stride + padded(D) + 1);
    gate_up_size = 2 * padded(T * panel_rows(T, E));
    take(hidden, T * E);
    take(normed, T * padded(E));
    take(qkv, T * (H + 2 * model.num_kv_heads) * D);
    take(cosine, T * D / 2);
    take(sine, T * D / 2);
    take(query, T * H * padded(D));
    take(attended, T * padded(H * D));
    take(feed_forward, T * padded(model.feed_forward));
    take(wanted, num_wanted * padded(E));
    take(scores, num_threads * scores_size);
    take(gate_up, num_threads * gate_up_size);
  }
};

// One thread's view of a forward.
template <class Weight>
class Worker {
 public:
  Worker(const ForedraftModel& model, const ForedraftForward& forward, const Workspace& work,
         const std::vector<Visible>& visible, Member me)
      : model_(model), forward_(forward), work_(work), visible_(visible), me_(me) {}

  void run() const {
    embed();
    me_.sync();
    for (int64_t index = forward_.first_layer; index < forward_.end_layer; ++index) layer(index);
    normalise(forward_.num_wanted, forward_.wanted, model_.final_norm, work_.wanted);
    me_.sync();
    head();
  }

 private:
  const ForedraftModel& model_;
  const ForedraftForward& forward_;
  const Workspace& work_;
  const std::vector<Visible>& visible_;
  const Member me_;

  const int64_t T = forward_.num_tokens, E = model_.hidden, D = model_.head_dim;
  const int64_t H = model_.num_heads, G = H / model_.num_kv_heads, F = model_.feed_forward;
  const int64_t qkv_width = (H + 2 * model_.num_kv_heads) * D;

  void layer(int64_t index) const {
    const ForedraftLayer& layer = model_.layers[index];
    if (layer.qkv) attention(index, layer);
    if (layer.gate_up) mlp(layer);
    tap(index);
  }

  void attention(int64_t index, const ForedraftLayer& layer) const {
    normalise(T, nullptr, layer.attention_norm, work_.normed);
    me_.sync();
    qkv(layer);
    me_.sync();
    rotate(index, layer);
    me_.sync();
    attend(index);
    me_.sync();
    add_product(layer.output, layer.output_bias, {work_.attended, padded(H * D)}, H * D);
    me_.sync();
  }

  void mlp(const ForedraftLayer& layer) const {
    normalise(T, nullptr, layer.mlp_norm, work_.normed);
    me_.sync();
    gate_up(layer);
    me_.sync();
    add_product(layer.down, nullptr, {work_.feed_forward, padded(F)}, F);
    me_.sync();
  }

  static Matrix<Weight> matrix(const void* data, int64_t K) {
    return {static_cast<const Weight*>(data), K};
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

  static void pad_with_zeros(float* rows, int64_t row, int64_t size) {
    const int64_t whole = padded(size), last = size - size % kPair;
    std::fill(rows + row * whole + last, rows + (row + 1) * whole, 0.0f);
  }

  // 1 / root mean square of a row.
  float inverse_rms(const float* x, int64_t size) const {
    Vec squares{};
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
    float rest[kLanes] = {};
    std::copy(x + i, x + size, rest);
    squares = fma(load(rest), load(rest), squares);
    const float mean = sum_lanes(squares) / float(size);
    return 1.0f / std::sqrt(mean + float(model_.norm_eps));
  }

  // RMS-normalised hidden states in lane order, of all tokens or of those listed.
  void normalise(int64_t count, const int32_t* tokens, const float* weight, float* out) const {
    const Range mine = me_.share(count);
    for (int64_t i = mine.begin; i < mine.end; ++i) {
      const float* x = work_.hidden + (tokens ? tokens[i] : i) * E;
      const float scale = inverse_rms(x, E);
      float* row = out + i * padded(E);
      pad_with_zeros(out, i, E);
      for (int64_t k = 0; k < E; ++k) row[lane_order<Weight>(k)] = weight[k] * (x[k] * scale);
    }
  }

  void qkv(const ForedraftLayer& layer) const {
    const float* bias = layer.qkv_bias;
    matmul(matrix(layer.qkv, E), me_.share(qkv_width, kPanelRows), {work_.normed, padded(E)}, T,
           [&](int64_t token, int64_t row, float value) {
             work_.qkv[token * qkv_width + row] = bias ? value + bias[row] : value;
           });
  }

  void rotate(int64_t index, const ForedraftLayer& layer) const {
    const int64_t num_kv = model_.num_kv_heads, heads = H + 2 * num_kv;
    const Range mine = me_.share(T * heads);
    for (int64_t i = mine.begin; i < mine.end; ++i) {
      const int64_t token = i / heads, head = i % heads;
      float* x = work_.qkv + token * qkv_width + head * D;
      if (head < H) {
        normalise_head(x, layer.query_norm);
        rotate_head(x, token);
        put_query(x, token, head);
      } else if (head < H + num_kv) {
        normalise_head(x, layer.key_norm);
        rotate_head(x, token);
        put_cache(x, token, cache_at(forward_.keys, index, forward_.slots[token], head - H));
      } else {
        put_cache(x, token,
                  cache_at(forward_.values, index, forward_.slots[token], head - H - num_kv));
      }
    }
  }

  void normalise_head(float* x, const float* weight) const {
    if (!weight) return;
    const float scale = inverse_rms(x, D);
    for (int64_t i = 0; i < D; ++i) x[i] = weight[i] * (x[i] * scale);
  }

  void rotate_head(float* x, int64_t token) const {
    const float* cosine = work_.cosine + token * D / 2;
    const float* sine = work_.sine + token * D / 2;
    for (int64_t i = 0; i < D / 2; ++i) {
      const float first = x[i], second = x[i + D / 2];
      x[i] = first * cosine[i] - second * sine[i];
      x[i + D / 2] = second * cosine[i] + first * sine[i];
    }
  }

  // query is [H/G, T, G, D]: the queries of a key-value head are neighbours.
  float* query_at(int64_t kv_head, int64_t token) const {
    return work_.query + (kv_head * T + token) * G * padded(D);
  }

  void put_query(const float* x, int64_t token, int64_t head) const {
    float* row = query_at(head / G, token) + head % G * padded(D);
    const float scale = 1.0f / std::sqrt(float(D));
    pad_with_zeros(row, 0, D);
    for (int64_t i = 0; i < D; ++i) row[lane_order<Weight>(i)] = x[i] * scale;
  }

  Weight* cache_at(void* store, int64_t index, int64_t slot, int64_t kv_head) const {
    return static_cast<Weight*>(store) + index * forward_.layer_stride +
           slot * forward_.slot_stride + kv_head * forward_.head_stride;
  }

  void put_cache(const float* x, int64_t token, Weight* entries) const {
    Weight* target = entries + forward_.entries[token] * D;
    for (int64_t i = 0; i < D; ++i) from_float(x[i], target[i]);
  }

  // Tiles are dealt out in turn. They get smaller, down to one token, until each thread has two.
  void attend(int64_t index) const {
    const int64_t num_kv = model_.num_kv_heads;
    int64_t step = kTileTokens;
    while (step > 1 && T * num_kv < 2 * me_.size * step) step /= 2;
    int64_t tile = 0;
    for (int64_t r = 0; r < forward_.num_rows; ++r) {
      const ForedraftRow& row = forward_.rows[r];
      for (int64_t t = row.first_token; t < row.end_token; t += step)
        for (int64_t kv_head = 0; kv_head < num_kv; ++kv_head)
          if (tile++ % me_.size == me_.index)
            attend_tile(index, {t, std::min(t + step, row.end_token)}, kv_head);
    }
  }

  void attend_tile(int64_t index, Range tokens, int64_t kv_head) const {
    const int64_t slot = forward_.slots[tokens.begin];
    float* scores = work_.scores + me_.index * work_.scores_size;
    float* attended = scores + work_.tile_queries * work_.score_stride;
    const AttentionTile<Weight> tile{
        cache_at(forward_.keys, index, slot, kv_head),
        cache_at(forward_.values, index, slot, kv_head),
        D,
        G,
        {query_at(kv_head, tokens.begin), padded(D)},
        &visible_[tokens.begin],
        tokens.end - tokens.begin,
        scores,
        work_.score_stride,
        attended,
        attended + work_.tile_queries * padded(D),
    };
    tile.run([&](int64_t token, int64_t head, const float* values, float factor) {
      float* out = work_.attended + (tokens.begin + token) * padded(H * D);
      put_attended(out, (kv_head * G + head) * D, values, factor);
    });
  }

  // A head's values, times `factor`, at `offset` of the row `out`; both are in lane order.
  void put_attended(float* out, int64_t offset, const float* values, float factor) const {
    if (offset % kPair == 0 && D % kPair == 0) {
      for (int64_t d = 0; d < D; ++d) out[offset + d] = values[d] * factor;
    } else {
      for (int64_t d = 0; d < D; ++d)
        out[lane_order<Weight>(offset + d)] = values[lane_order<Weight>(d)] * factor;
    }
  }

  // hidden += x . W (+ bias)
  void add_product(const void* weights, const float* bias, Activations x, int64_t K) const {
    matmul(matrix(weights, K), me_.share(E, kPanelRows), x, T,
           [&](int64_t token, int64_t row, float value) {
             work_.hidden[token * E + row] += bias ? value + bias[row] : value;
           });
  }

  // Gate and up rows of a panel go to scratch [T, panel], and their product to feed_forward.
  void gate_up(const ForedraftLayer& layer) const {
    const Matrix<Weight> gate = matrix(layer.gate_up, E);
    const Matrix<Weight> up{gate.row(F), E};
    const Activations x{work_.normed, padded(E)};
    float* gates = work_.gate_up + me_.index * work_.gate_up_size;
    float* ups = gates + work_.gate_up_size / 2;
    const Range mine = me_.share(F, kPanelRows);
    const int64_t step = panel_rows(T, E);
    for (int64_t begin = mine.begin; begin < mine.end; begin += step) {
      const Range rows{begin, std::min(begin + step, mine.end)};
      const int64_t width = rows.end - rows.begin;
      const int64_t ahead = rows.end < mine.end ? width : 0;
      const auto into = [&](float* scratch) {
        return [=](int64_t token, int64_t row, float value) {
          scratch[token * width + row - begin] = value;
        };
      };
      all_tokens(gate, rows, x, T, ahead, into(gates));
      all_tokens(up, rows, x, T, ahead, into(ups));
      for (int64_t i = 0; i < T * width; i += kLanes)
        store(gates + i, silu(load(gates + i)) * load(ups + i));
      for (int64_t t = 0; t < T; ++t)
        for (int64_t i = 0; i < width; ++i)
          work_.feed_forward[t * padded(F) + lane_order<Weight>(begin + i)] = gates[t * width + i];
    }
  }

  void tap(int64_t index) const {
    if (!forward_.taps[index]) return;
    const Range mine = me_.share(T);
    std::copy(work_.hidden + mine.begin * E, work_.hidden + mine.end * E,
              forward_.taps[index] + mine.begin * E);
    me_.sync();
  }

  void head() const {
    const int64_t V = model_.vocab;
    matmul(matrix(model_.head, E), me_.share(V, kPanelRows), {work_.wanted, padded(E)},
           forward_.num_wanted, [&](int64_t token, int64_t row, float value) {
             forward_.logits[token * V + row] = value;
           });
  }
};

std::vector<Visible> visible_entries(const ForedraftForward& forward) {
  std::vector<Visible> visible(forward.num_tokens);
  for (int64_t t = 0; t < forward.num_tokens; ++t) {
    const int32_t start = forward.extra_starts[t];
    visible[t] = {forward.prefixes[t], forward.extras + start, forward.extra_starts[t + 1] - start};
  }
  return visible;
}

template <class Weight>
void run(const ForedraftModel& model, const ForedraftForward& forward) {
  const Workspace work(model, forward.num_tokens, forward.num_wanted, forward.max_entries,
                       forward.num_threads, forward.workspace);
  const std::vector<Visible> visible = visible_entries(forward);
  Barrier barrier;
#pragma omp parallel num_threads(int(forward.num_threads))
  {
    const Member me{barrier, omp_get_thread_num(), omp_get_num_threads()};
    Worker<Weight>(model, forward, work, visible, me).run();
  }
}

}  // namespace

extern "C" {

__attribute__((visibility("default")))
void foredraft_use_huge_pages(void* begin, int64_t size) { use_huge_pages(begin, size); }

// Floats of work memory that a forward of this size needs.
__attribute__((visibility("default")))
int64_t foredraft_workspace_size(const ForedraftModel* model, int64_t num_tokens,
                                 int64_t num_wanted, int64_t max_entries, int64_t num_threads) {
  return Workspace(*model, num_tokens, num_wanted, max_entries, num_threads, nullptr).size;
}

__attribute__((visibility("default")))
void foredraft_forward(const ForedraftModel* model, const ForedraftForward* forward) {
  if (model->is_bf16) run<bf16>(*model, *forward);
  else run<float>(*model, *forward);
}

}  // extern "C"
