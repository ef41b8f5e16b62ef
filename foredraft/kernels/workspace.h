// The memory that a forward works in.
//
// Shape legend: see worker.h.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention_plan.h"
#include "interface.h"
#include "products.h"
#include "recurrent.h"
#include "rows.h"
#include "simd.h"

namespace foredraft {

constexpr int64_t kFewTokens = 32;   // up to here each thread prepares its inputs alone

// The work buffers of one forward, one after another in the caller's workspace. Rows in lane order
// are padded to whole pairs. `Weight` and `Form` as in worker.h.
template <class Weight, class Form>
struct Workspace {
  using Scratch = AttentionScratch<AttentionOf<Weight, Form>>;
  using FloatScratch = AttentionScratch<FloatAttention<int8_t>>;  // over entries of int8

  int64_t size = 0;  // floats

  float* gates;          // of delta nets [T, 2 Hv]
  float *hidden, *normed, *qkv, *cosine, *sine, *attended, *feed_forward;
  float* added;          // what is normalised before it is added
  float* before;         // hidden states in front of a layer whose parts both read them; embeddings
  float *told, *projected;  // what layers are told of tokens [T, W], and of it what embeddings tell
  float* chances;        // of the chosen experts [T, experts], in the order of `chosen`
  float* chosen;         // their numbers as int32 [T, experts], ascending
  float* routed;         // [T, X]
  float* gathered;       // inputs of one expert's tokens; per thread
  float* pairs;          // inputs of `down` of all tokens with their experts
  float* prepared;       // of the product at hand; as `normed` per thread, if tokens are few
  float* of_heads;       // of latent attention [H, T, .]: still parts of queries, or attended latents
  float* head_inputs;    // of these
  float *attention, *gate_up;  // per thread
  float* kept_chunks;          // of attention
  int64_t normed_size, prepared_size, attention_size, gate_up_size, gathered_size;  // per thread
  int64_t pair_size;  // floats of each pair
  int64_t head_size;  // floats of each head's inputs
  int64_t kept_chunk_size, gate_up_rows;
  int64_t rope_pairs;     // of the largest heads

  static constexpr int64_t kScratch = 8192;  // floats of gates, and as many of ups
  // What a thread alone writes lies so far from what others write that no core fetches it unasked.
  static constexpr int64_t kApart = 1024;

  static int64_t whole_lines(int64_t count) { return (count + 31) / 32 * 32; }  // pairs of them

  Workspace(const ForedraftModel& model, int64_t num_tokens, int64_t num_wanted,
            int64_t max_entries, int64_t num_threads, float* memory) {
    const auto take = [&](float*& buffer, int64_t count) {
      buffer = memory + size;
      size += whole_lines(count);
    };
    const int64_t T = num_tokens, E = model.hidden;
    const ForedraftLatent& latent = model.latent;
    const Heads kinds[2] = {{model, 0}, {model, 1}};
    const auto most = [&](const auto& size) { return std::max(size(kinds[0]), size(kinds[1])); };
    const auto queries = [&](const Heads& of) { return std::min(T, kTileTokens) * of.G; };
    const int64_t preparing = T <= kFewTokens ? num_threads : 1;
    normed_size = whole_lines(std::max(T, num_wanted) * padded(std::max(E, latent.query_rank))) + kApart;
    const RecurrentSizes recurrent(model.recurrent);
    const int64_t most_attended = std::max({most([](const Heads& of) { return of.H * of.D; }),
                                            recurrent.num_outputs, model.num_heads * latent.values});
    const int64_t F = std::max({model.feed_forward, model.dense_feed_forward, model.input_size});
    const int64_t most_inputs = std::max({E, most_attended, F, latent.query_rank});
    const int64_t X = model.num_experts, chosen_by_all = T * model.chosen_experts;
    const int64_t packed = X ? PackedInputs::size(T, most_inputs) : 0;  // experts may be, all else not
    prepared_size = whole_lines(std::max(Form::prepared_size(T, most_inputs), packed)) + kApart;
    attention_size = kApart + whole_lines(most([&](const Heads& of) {
      return std::max(Scratch::size(queries(of), of.D), FloatScratch::size(queries(of), of.D));
    }));
    kept_chunk_size =
        whole_lines(most([&](const Heads& of) { return Attended::size(queries(of), of.D); }));
    const int64_t panel = panel_rows(Form::rows({}, E), T);
    const int64_t panels = std::max<int64_t>(1, kScratch / T / panel);
    gate_up_rows = std::min(whole_lines(panels * panel), whole_lines(F));
    // Room for the rounding of rows, too: a description is used for fewer tokens than it was made for,
    // so no smaller number of tokens may need more room.
    const int64_t rounded = std::max(kScratch, T * panel) + T * whole_lines(1);
    gate_up_size =
        whole_lines(2 * std::min(rounded, T * whole_lines(F))) + kApart;
    take(hidden, T * E);
    take(normed, preparing * normed_size);
    const int64_t qkv_rows = most([](const Heads& of) { return of.qkv_rows; });
    take(qkv, T * std::max(qkv_rows, recurrent.width));
    take(gates, T * recurrent.num_gates);
    rope_pairs = most([](const Heads& of) { return of.D / 2; });
    rope_stride_ = T * rope_pairs;
    take(cosine, model.num_ropes * rope_stride_);
    take(sine, model.num_ropes * rope_stride_);
    take(attended, T * padded(std::max(most_attended, latent.query_rank)));
    take(feed_forward, std::max(T * padded(F), chosen_by_all * padded(model.feed_forward)));
    take(added, has_post_norms(model) ? T * E : 0);
    take(before, model.keeps_inputs ? T * E : 0);
    take(told, T * model.input_width);
    take(projected, T * model.input_width);
    take(chances, chosen_by_all);
    take(chosen, chosen_by_all);
    take(routed, T * X);
    gathered_size = std::max(prepared_size, whole_lines(T * padded(E)) + kApart);
    take(gathered, X ? num_threads * gathered_size : 0);
    // An eighth more, for tiles are filled up.
    const int64_t of_pair = std::max(Form::prepared_size(1, model.feed_forward),
                                     PackedInputs::size(1, model.feed_forward));
    pair_size = whole_lines(of_pair * 9 / 8);
    take(pairs, chosen_by_all * pair_size);
    take(prepared, preparing * prepared_size);
    const int64_t most_of_head = std::max(latent.rank, latent.still);
    head_size = whole_lines(Form::prepared_size(T, most_of_head));
    take(of_heads, latent.rank ? model.num_heads * T * padded(most_of_head) : 0);
    take(head_inputs, latent.rank ? model.num_heads * head_size : 0);
    take(attention, num_threads * attention_size);
    take(kept_chunks, kept_chunk_size * most([&](const Heads& of) {
      return AttentionPlan::most_kept(T, of.num_kv, max_entries, num_threads);
    }));
    take(gate_up, num_threads * gate_up_size);
  }

  // Turns a token's head as the layer does.
  void rotate(const ForedraftModel& model, const ForedraftLayer& layer, int64_t token,
              float* x) const {
    if (layer.rope < 0) return;
    const int64_t at = layer.rope * rope_stride_ + token * rope_pairs;
    rotate_head(x, cosine + at, sine + at, model.rope_sizes[layer.rope]);
  }

 private:
  int64_t rope_stride_;

  static bool has_post_norms(const ForedraftModel& model) {
    if (!model.num_layers) return false;
    return model.layers[0].attention_post_norm || model.layers[0].mlp_post_norm;
  }
};

}  // namespace foredraft
