// What Python hands over. interface.py reads this file: one declaration a member, or several numbers.
//
// Shape legend: see worker.h.
#pragma once

#include <cstdint>

#include "draw.h"

extern "C" {

// Of a matrix that is packed in few bits: what its chunks hold (formats.h). The bits of an integer, and
// where its scale comes from: one of its own, or a step of 64 inputs times a whole number.
enum ForedraftFormat : int64_t {
  kInt8, kInt4, kInt5, kNested4, kNested5, kNested6, kCentred4, kCentred5,
  kNested2, kNested3, kIq4, kFp4, kNestedIq4, kNestedIq2, kNestedIq3S, kNestedIq3,
  kNumFormats,
  kNotPacked = -1
};

struct ForedraftMatrix {
  const void* data;
  int64_t format;               // a ForedraftFormat, or kNotPacked
  int64_t step;                 // bytes from an expert's matrix to that of the next
};

// A norm or a bias that is null is not there. Of a recurrent layer qkv is the input projection, and output
// that of what it gives.
struct ForedraftLayer {
  const float* attention_norm;  // [E]
  ForedraftMatrix qkv[3];       // [(H + 2 H/G) D, E] in parts; null: the layer has no attention
  int64_t qkv_rows[3];          // of each part, of the first ones in whole groups; 0: there is none
  const float* qkv_bias;
  const float* query_norm;      // [D], or [H D] of all heads together
  const float* key_norm;        // [D], or [H/G D]
  ForedraftMatrix output;       // [E, H D], or [E, H values] where entries are latents
  const float* output_bias;     // [E]
  const float* mlp_norm;        // [E]
  ForedraftMatrix gate, up;     // [F, E] each; without gates these are null, and up is activated
  ForedraftMatrix down;         // [E, F]
  const float* attention_post_norm;  // [E] of what is added
  const float* mlp_post_norm;        // [E]
  const void* router;           // [X, E] in the type of Form::Order; gate, up and down are then of X experts
  const float* router_bias;     // [X] added to the logits, or to sigmoids for the choice alone
  const float* attention_norm_bias;  // [E]
  const float* mlp_norm_bias;        // [E]
  const float* sinks;           // [H] scores of something without a value that each token sees; or null
  const float* gate_bias;       // [F], of an expert 2 F behind those of another
  const float* up_bias;
  const float* down_bias;       // [E]
  const float* activation;      // [4] of xIELU: factors above and below 0, slope, and where it bends
  int64_t rope;                 // which rotary embedding, or -1: none
  int64_t view;                 // which window
  int64_t number;               // among the layers that attend, or among the recurrent ones
  const float* convolution;     // [K, C], or null: the layer is not recurrent
  const float* convolution_bias;  // [C]
  const void* gates;            // [2 Hv, E] as router; [Hv, E] of Mamba-2
  const float* decay_rates;     // [Hv]
  const float* step_bias;       // [Hv]
  const float* value_norm;      // [V], or [M] of Mamba-2, which may have none; [D] where a layer attends
  const float* skips;           // [Hv] of Mamba-2: the share of a head's value in what it gives
  const ForedraftLayer* beside; // a recurrent part that reads the same input as attention; or null
  int64_t kind;                 // which heads of the model it has, and which entries
  int64_t is_reader;            // it reads another layer's entries, and has no keys and values
  int64_t feed_forward;         // F
  double factor;                // of all that it gives
  ForedraftMatrix input;        // [P, E] what the embedding of a token tells it; null: it is told nothing
  ForedraftMatrix input_gate;   // [P, E] how much of that counts
  ForedraftMatrix input_output; // [E, P]
  const float* input_norm;      // [E]
  const ForedraftLayer* dense;  // a feed-forward part beside experts; or null
  const float* router_norm;     // [E] of what experts are chosen by, beside such a part
  const float* expert_factors;  // [X]
  const float* experts_post_norm;  // [E]
  ForedraftMatrix query;        // of latent attention [H (P + N), Q]; null: qkv gives queries
  ForedraftMatrix key_of_head;  // of each head [C, N]: what its scores take a latent times
  ForedraftMatrix value_of_head;  // of each head [values, C]
};

// Heads of keys and values, and the numbers of one of them, or of queries.
struct ForedraftHeads {
  int64_t num_kv_heads, head_dim;
};

// Of matrices: numbers of the cache's type, packed in few bits (packed.h), bfloat16 multiplied on tiles
// (tiles.h).
enum ForedraftForm : int64_t { kFormPlain, kFormPacked, kFormTiled };

enum ForedraftActivation : int64_t { kSilu, kGeluTanh, kRelu2, kClippedSilu, kXielu };

// The recurrent layers of a model: see models/native/recurrent.py. Those of delta nets and of Mamba-2 have
// heads.
struct ForedraftRecurrent {
  int64_t window, channels;      // K, C; 0: there are none
  int64_t key_heads, value_heads, key_size, value_size;  // G, Hv, D, V; 0: short convolutions
  int64_t is_tiled;              // value heads h, h + G, ... share a key head, and not neighbours
  int64_t is_mamba;
};

// Latent attention: an entry of D numbers has P that turn and behind them a latent, which is its value.
// Query heads read the same entries: there is one head of these, however many the model is said to have.
struct ForedraftLatent {
  int64_t rank;                  // C; 0: there is none
  int64_t query_rank;            // Q: what queries are made of; 0: a layer's input
  int64_t still;                 // N: numbers of a head's query that do not turn
  int64_t values;                // of a head
};

struct ForedraftModel {
  int64_t hidden, feed_forward, num_layers, num_heads;
  ForedraftHeads heads[2];       // of two kinds of layers; twice the same, if there is one
  int64_t vocab;                 // V: rows of the head
  int64_t is_bf16;               // cache, and matrices that are no packed ones; float32 if 0
  int64_t form;                  // of the matrices but the embeddings: a ForedraftForm
  int64_t int8_activations;      // what packed matrices multiply has 8 bits, 16 if 0
  double norm_eps;
  const ForedraftLayer* layers;  // [L]
  ForedraftMatrix embedding;     // of all tokens, [., E]
  ForedraftMatrix head;          // [V, E]
  const float* final_norm;       // [E]
  ForedraftMatrix screen;        // [V, E] the head in fewer bits, of a draft's packed ones; or null: none
  int64_t num_ropes;
  const float* inv_freq;         // [ropes, D / 2] with the larger D
  const int64_t* rope_sizes;     // [ropes] how many of a head's numbers are rotated
  const float* amplitudes;       // [ropes] what cosines and sines are multiplied with
  int64_t num_views;
  const int64_t* windows;        // [views] what a token sees: the last so many entries, or all if 0
  const int64_t* view_kinds;     // [views] of their layers
  int64_t norms_all_heads;       // query_norm and key_norm are of all heads together
  int64_t activation;            // a ForedraftActivation
  int64_t num_experts, chosen_experts;  // X, and how many of them a token chooses
  int64_t normalises_chances;    // those of the chosen ones add up to 1
  double query_scale;            // of scores; 0: 1 / root of D
  double attention_cap, logits_cap;     // scores s become c tanh(s / c); 0: they stay
  double logits_scale, embedding_scale, residual_scale;
  int64_t gates_attention;       // behind each head of queries lie gates of what it attends to
  ForedraftRecurrent recurrent;
  int64_t shared_experts;        // the last ones, which each token chooses beside others
  int64_t shared_gate;           // by the sigmoid of one more logit; with weight 1 if 0
  int64_t sigmoid_chances;       // of the others: sigmoids of their logits; their softmax if 0
  double chance_floor, chance_scale;  // added to what chances are divided by; their factor
  int64_t dense_feed_forward;    // the largest F of layers without a router, if that is another
  int64_t layer_norms;           // norms subtract the mean
  const float* final_norm_bias;  // [E]
  int64_t is_parallel;           // both parts of a layer read its input
  int64_t norms_rotated;         // queries and keys are normalised behind rotary embedding
  int64_t keeps_inputs;          // some part of a layer reads its input behind another
  int64_t input_size;            // P of what layers are told of a token; 0: nothing
  int64_t input_width;           // P times the layers of the table
  ForedraftMatrix inputs;        // [., W] the tables, one beside the other
  const float* input_norm;       // [P]
  int64_t num_ids;               // rows of the head behind these are no tokens: their logits are -inf
  int64_t expert_groups;         // of the experts that are chosen, side by side
  int64_t chosen_groups;         // those whose best experts rank highest
  ForedraftLatent latent;
};

// The entries of one kind of layers.
struct ForedraftStore {
  void* keys;                   // [blocks, L, H/G, B, D], of int8 [., ., ., ., 4 + D]
  void* values;
  int64_t block_stride, layer_stride, head_stride;  // in elements
};

// A state [L, S] to be made, behind so many elements.
struct ForedraftSave {
  int64_t num_elements;
  float* values;
};

// What recurrent layers have of a row: elements are `num_old` logged tokens, then the row's own.
struct ForedraftStates {
  const float* state;            // [L, S]
  const float* old_log;          // [L, num_old, W]
  float* new_log;                // [L, ., W] of the row's tokens from `first_logged` on
  const int32_t* parents;        // of each token of the row the element before it; -1: the state
  const ForedraftSave* saves;    // in the order of elements
  float* elements;               // [num_old + tokens, W] to work in
  int64_t num_old, first_logged, num_saves;
  int64_t old_stride, new_stride;  // from a layer to the next
};

struct ForedraftRow {
  int64_t first_token, end_token;
};

struct ForedraftForward {
  int64_t num_tokens, num_wanted, num_rows, max_entries;
  const int32_t* token_ids;     // [T]
  const int32_t* positions;     // [T]
  const int32_t* entries;       // [T] cache entry to write
  const int32_t* const* tables; // [T] blocks of the slot, in the order of its entries
  const int32_t* prefixes;      // [T] leading entries seen
  const int32_t* extra_starts;  // [T + 1] into extras
  const int32_t* extras;        // entries seen beyond the prefix, ascending per token
  const int32_t* wanted;        // [N]
  const ForedraftRow* rows;
  ForedraftStore stores[2];     // by kind
  int64_t block_entries;        // B: a power of two, a multiple of kRunEntries (entries.h)
  float* logits;                // [N, V], or [N, num_first + num_others]
  int64_t first_layer, end_layer;
  const float* hidden;          // [T, E] what the layer before gave; null: start from embeddings
  void* const* taps;            // [L] where to copy that layer's output [T, E], or null
  float* workspace;
  int64_t num_threads;
  double* phase_seconds;        // [4] linear layers, attention, head, all else; or null
  int64_t num_draws;
  ForedraftDraw* draws;         // from logits of this forward
  int64_t rounds_taps;          // to the type of the embeddings; float32 if 0
  int64_t int8_entries;         // the cache holds int8 with a scale (entries.h); 0: numbers as is_bf16 says
  const ForedraftStates* states;  // of each row, or null
  float* matrices;              // [threads, 2, D V] to work in
  int64_t num_first;            // of a screened draft: the head's rows that are scored; 0: all
  int64_t num_others;           // up to kMostOthers rows beyond these that are, too
  const int32_t* others;        // [draws, num_others]; -1 behind the last one of a draw
};

}  // extern "C"
