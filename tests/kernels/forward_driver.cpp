// Whole forwards of small models with made-up weights, in every format and fed in many ways: each token
// must have the bits that it has alone, in one thread. Prints a hash of these bits for each format.
//
// For builds that Python cannot load: with sanitizers, or for CPUs that are only emulated. All memory
// is of the exact size, so that a stray read or write ends in nobody's.
//
// Shape legend: see worker.h.
#include "decoder.cpp"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>

namespace {

using Numbers = std::vector<int32_t>;
using Floats = std::vector<float>;

constexpr int64_t kBlockEntries = kRunEntries, kBlocks = 24;
constexpr int64_t kPrompt = 290;  // beyond a chunk of attention

struct Model {
  const char* name;
  bool is_bf16;
  ForedraftForm form;
  ForedraftFormat format = kInt8, head = kInt8;
  bool is_mixed = false;  // values in a format of their own, packed embeddings
  bool int8_entries = false;
  bool int8_activations = false;
  bool packs_experts = false;  // beside matrices that are not
};

struct Sizes {
  int64_t hidden, feed_forward, num_heads, num_kv_heads, head_dim, vocab;
};

// What models of some families have beside a model of Llama.
enum Kind { kLlama, kWindows, kPostNorms, kExperts, kGemma4, kLatents };

// ---- a model ------------------------------------------------------------------------------------

class MadeUp {
 public:
  ForedraftModel model{};
  const int64_t element;  // bytes of a number in embeddings
  const bool int8_entries;

  MadeUp(const Model& made, const Sizes& sizes, Kind kind)
      : element(made.is_bf16 ? 2 : 4), int8_entries(made.int8_entries) {
    const int64_t E = sizes.hidden, F = sizes.feed_forward, H = sizes.num_heads;
    const ForedraftHeads usual{sizes.num_kv_heads, sizes.head_dim}, wide{H, sizes.head_dim + 4};
    model.heads[0] = usual, model.heads[1] = kind == kGemma4 ? wide : usual;
    model.is_bf16 = made.is_bf16, model.form = made.form, model.norm_eps = 1e-5;
    for (ForedraftLayer& layer : layers_) {
      const bool is_rich = &layer == layers_;  // with all that a layer may have
      layer.kind = kind == kGemma4 && !is_rich;
      const int64_t D = model.heads[layer.kind].head_dim, kv_heads = model.heads[layer.kind].num_kv_heads;
      const bool is_mixed = made.is_mixed && H * D % kGroupRows == 0;
      layer.number = kind == kGemma4 ? 0 : &layer - layers_, layer.feed_forward = F, layer.factor = 1;
      layer.attention_norm = vector(E, 1);
      const int64_t queries = is_mixed ? H * D : (H + 2 * kv_heads) * D;
      layer.qkv[0] = matrix(made, queries, E), layer.qkv_rows[0] = queries;
      if (is_mixed)
        layer.qkv[1] = packed(kNested6, 2 * kv_heads * D, E), layer.qkv_rows[1] = 2 * kv_heads * D;
      layer.qkv_bias = is_rich ? vector((H + 2 * kv_heads) * D, 0) : nullptr;
      layer.query_norm = is_rich ? vector(H * D, 1) : nullptr;
      layer.key_norm = is_rich ? vector(kv_heads * D, 1) : nullptr;
      layer.output = matrix(made, E, H * D);
      layer.output_bias = is_rich ? vector(E, 0) : nullptr;
      layer.mlp_norm = vector(E, 1);
      const bool has_experts = kind == kExperts || ((kind == kGemma4 || kind == kLatents) && !is_rich);
      const int64_t num_experts = has_experts ? 3 : 1;
      Model own = made;
      if (made.packs_experts) own.form = kFormPacked;
      layer.gate = matrix(own, F, E, num_experts), layer.up = matrix(own, F, E, num_experts);
      layer.down = matrix(own, E, F, num_experts);
      if (kind == kWindows) layer.view = is_rich ? 1 : 2, layer.rope = is_rich ? 1 : -1;
      if (kind == kGemma4) {
        layer.view = layer.rope = layer.kind;
        layer.value_norm = vector(D, 1), layer.factor = 0.8;
        layer.input = matrix(made, kTold, E), layer.input_gate = matrix(made, kTold, E);
        layer.input_output = matrix(made, E, kTold), layer.input_norm = vector(E, 1);
      }
      if (has_experts && kind == kGemma4) {
        dense_.mlp_norm = vector(E, 1), dense_.mlp_post_norm = vector(E, 1);
        dense_.gate = matrix(made, 2 * F, E), dense_.up = matrix(made, 2 * F, E);
        dense_.down = matrix(made, E, 2 * F), dense_.feed_forward = 2 * F;
        layer.dense = &dense_, layer.router_norm = vector(E, 1);
        layer.expert_factors = vector(3, 1), layer.experts_post_norm = vector(E, 1);
      }
      if (kind == kPostNorms || kind == kGemma4) {
        if (kind == kPostNorms) layer.attention_norm = layer.mlp_norm = nullptr;
        layer.attention_post_norm = vector(E, 1), layer.mlp_post_norm = vector(E, 1);
      }
      if (has_experts) layer.router = router(made, E);
      if (kind == kLatents) make_latent(made, layer, E, H, D);
    }
    model.hidden = E, model.feed_forward = F, model.num_layers = kLayers, model.num_heads = H;
    model.vocab = model.num_ids = sizes.vocab, model.layers = layers_;
    if (kind == kGemma4) {
      model.input_size = kTold, model.input_width = kLayers * kTold, model.input_norm = vector(kTold, 1);
      const int64_t width = model.input_width;
      model.inputs = made.is_mixed ? packed(kNested5, sizes.vocab, width)
                                   : ForedraftMatrix{plain(sizes.vocab * width, width), kNotPacked, 0};
      model.dense_feed_forward = 2 * F, model.keeps_inputs = 1;
    }
    model.int8_activations = made.int8_activations;
    model.embedding = made.is_mixed ? packed(kNested5, sizes.vocab, E)
                                    : ForedraftMatrix{plain(sizes.vocab * E, E), kNotPacked, 0};
    const Model head{made.name, made.is_bf16, made.form, made.head};
    model.head = matrix(head, sizes.vocab, E);
    model.final_norm = vector(E, 1);
    const int64_t D = model.heads[0].head_dim, pairs = model.heads[1].head_dim / 2;
    float* inv_freq = reinterpret_cast<float*>(memory(2 * pairs * 4));
    for (int64_t i = 0; i < 2 * pairs; ++i)
      inv_freq[i] = 1.0f / float(1 << std::min<int64_t>(i % pairs, 12));
    model.inv_freq = inv_freq, model.num_ropes = 2;
    rope_sizes_[0] = D, rope_sizes_[1] = D / 4 * 2;
    model.rope_sizes = rope_sizes_, model.amplitudes = amplitudes_;
    model.windows = windows_, model.view_kinds = view_kinds_, model.num_views = kind == kWindows ? 3 : kind == kGemma4 ? 2 : 1;
    if (kind == kGemma4) view_kinds_[1] = 1;
    model.logits_scale = model.embedding_scale = model.residual_scale = 1;
    model.norms_all_heads = kind == kPostNorms;
    if (kind == kWindows) model.activation = kGeluTanh, model.attention_cap = 3, model.logits_cap = 4;
    if (kind == kPostNorms) model.query_scale = 0.2, model.residual_scale = 0.7;
    model.expert_groups = model.chosen_groups = 1;
    if (kind == kLatents) model.query_scale = 0.3, model.expert_groups = 3, model.chosen_groups = 2;
    if (kind == kExperts || kind == kGemma4 || kind == kLatents)
      model.num_experts = 3, model.chosen_experts = 2, model.normalises_chances = 1, model.chance_scale = 1;
  }
  MadeUp(const MadeUp&) = delete;

  static constexpr int64_t kLayers = 2, kTold = 12;

 private:
  ForedraftLayer layers_[kLayers] = {}, dense_{};
  int64_t rope_sizes_[2];
  const float amplitudes_[2] = {1.0f, 1.2f};
  const int64_t windows_[3] = {0, 7, 270};
  int64_t view_kinds_[3] = {};
  std::mt19937 random_;
  std::vector<std::vector<uint8_t>> memory_;

  void make_latent(const Model& made, ForedraftLayer& layer, int64_t E, int64_t H, int64_t D) {
    const int64_t turned = D / 4 * 2, C = D - turned, N = 7, Q = E % 2 ? 11 : 0, values = Q ? D + 5 : 9;
    model.latent = {C, Q, N, values};
    const int64_t queries = H * (turned + N), low = Q ? Q : queries;
    layer.qkv[0] = matrix(made, low + D, E), layer.qkv_rows[0] = low + D, layer.qkv_rows[1] = 0;
    layer.query_norm = Q ? vector(Q, 1) : nullptr, layer.key_norm = vector(C, 1), layer.rope = 1;
    if (Q) layer.query = matrix(made, queries, Q);
    layer.qkv_bias = layer.qkv_bias ? vector(low + D, 0) : nullptr;
    layer.key_of_head = matrix(made, C, N, H), layer.value_of_head = matrix(made, values, C, H);
    layer.output = matrix(made, E, H * values);
  }

  uint8_t* memory(int64_t bytes) {
    memory_.emplace_back(size_t(bytes));
    return memory_.back().data();
  }

  float noise() { return float(int(random_() % 2001) - 1000) / 1000; }

  const float* vector(int64_t size, float around) {
    float* const values = reinterpret_cast<float*>(memory(size * 4));
    for (int64_t i = 0; i < size; ++i) values[i] = around + 0.2f * noise();
    return values;
  }

  // The first of `count` matrices behind one another.
  ForedraftMatrix matrix(const Model& made, int64_t rows, int64_t K, int64_t count = 1) {
    if (made.form == kFormPacked) return packed(made.format, rows, K, count);
    const int64_t groups = (rows + kGroupRows - 1) / kGroupRows;
    const int64_t tiled = groups * weight_chunks(K) * Bits16::kChunkBytes / 2;
    const int64_t size = made.form == kFormTiled ? tiled : rows * K;
    return {plain(count * size, K), kNotPacked, size * element};
  }

  const void* plain(int64_t count, int64_t K) {
    uint8_t* const bytes = memory(count * element);
    const float size = 2 / std::sqrt(float(K));
    for (int64_t i = 0; i < count; ++i) {
      const float value = size * noise();
      bf16 rounded;
      from_float(value, rounded);
      if (model.is_bf16) std::memcpy(bytes + 2 * i, &rounded, 2);
      else std::memcpy(bytes + 4 * i, &value, 4);
    }
    return bytes;
  }

  // Of three experts, in the type whose order activations are in.
  const void* router(const Model& made, int64_t E) {
    if (made.form == kFormPlain) return plain(3 * E, E);
    return vector(3 * E, 0);
  }

  // Any weights behind scales (and minima), or their steps: half-precision numbers that begin with these
  // bits.
  ForedraftMatrix packed(ForedraftFormat format, int64_t rows, int64_t K, int64_t count = 1) {
    switch (format) {
      case kInt8: return chunks<Int8>(format, rows, K, count, {0x1800, 0x1800});
      case kInt4: return chunks<Int4>(format, rows, K, count, {0x2800, 0x2800, 0xb400, 0xb400});
      case kInt5:
        return chunks<Int5>(format, rows, K, count, {0x2000, 0x2000, 0xb000, 0xb000});
      case kNested4: return chunks<Nested4>(format, rows, K, count, {0x1000, 0x8800});
      case kNested5:
        return chunks<Nested5>(format, rows, K, count, {0x0800, 0x8800});
      case kFp4: return chunks<Codes<kCodesFp4>>(format, rows, K, count, {0x2800, 0x2800});
      case kCentred4: return chunks<Centred4>(format, rows, K, count, {0x2800, 0x2800});
      default: return chunks<Nested6>(format, rows, K, count, {0x0400});
    }
  }

  template <class Format>
  ForedraftMatrix chunks(ForedraftFormat format, int64_t rows, int64_t K, int64_t count,
                         std::initializer_list<int> heads) {
    const int64_t step = ceil_div(rows, kGroupRows) * Format::group_bytes(K);
    const int64_t size = count * step;
    uint8_t* const data = memory(size);
    for (uint8_t* run = data; run < data + size; run += Format::kRunBytes) {
      uint8_t* to = run;
      for (int head : heads)
        for (int64_t row = 0; row < kGroupRows; ++row, to += 2) {
          const uint16_t half = uint16_t(head | (random_() & 0x3ff));
          std::memcpy(to, &half, 2);
        }
      for (; to < run + Format::kRunBytes; ++to) *to = uint8_t(random_());
    }
    return {data, format, step};
  }
};

// ---- forwards -----------------------------------------------------------------------------------

// A token, where it goes, and what it sees.
struct Token {
  int32_t id, position, entry, prefix;
  Numbers extras;
};

struct Row {
  int slot;
  std::vector<Token> tokens;
};

// A cache for two slots, whose blocks lie anywhere.
class Cache {
 public:
  explicit Cache(const MadeUp& made) : made_(made) {
    const int64_t element = made.int8_entries ? 1 : made.element;
    for (int kind = 0; kind < 2; ++kind) {
      const ForedraftHeads& heads = made.model.heads[kind];
      ForedraftStore& store = stores_[kind];
      store.head_stride = kBlockEntries * (heads.head_dim + (made.int8_entries ? kInFront<int8_t> : 0));
      store.layer_stride = heads.num_kv_heads * store.head_stride;
      store.block_stride = MadeUp::kLayers * store.layer_stride;
      for (auto& half : halves_[kind])  // what was never written is NaN
        half.assign(size_t(2 * kBlocks * store.block_stride * element), 0xff);
      const bool is_one = made.model.latent.rank;
      store.keys = halves_[kind][0].data(), store.values = halves_[kind][!is_one].data();
      if (is_one) store.head_stride = 0;
    }
    for (int32_t i = 0; i < 2 * kBlocks; ++i) tables_[i % 2].push_back((i * 7 + 3) % (2 * kBlocks));
  }

  struct Layers {
    int64_t begin = 0, end = MadeUp::kLayers;
    const float* hidden = nullptr;
    float* tap = nullptr;  // of the first of them
  };

  // Logits [T, V] of all tokens, one row after another.
  Floats forward(const std::vector<Row>& rows, int threads, Layers layers) {
    Numbers ids, positions, entries, prefixes, extra_starts{0}, extras, wanted;
    std::vector<const int32_t*> tables;
    std::vector<ForedraftRow> spans;
    int64_t most = 0;
    for (const Row& row : rows) {
      const int64_t first = int64_t(ids.size());
      for (const Token& token : row.tokens) {
        wanted.push_back(int32_t(ids.size()));
        ids.push_back(token.id), positions.push_back(token.position);
        entries.push_back(token.entry), prefixes.push_back(token.prefix);
        extras.insert(extras.end(), token.extras.begin(), token.extras.end());
        extra_starts.push_back(int32_t(extras.size()));
        tables.push_back(tables_[row.slot].data());
        most = std::max<int64_t>(most, token.entry + 1);
      }
      spans.push_back({first, int64_t(ids.size())});
    }
    if (layers.tap) wanted.clear();
    Floats logits(wanted.size() * size_t(made_.model.vocab));
    void* taps[MadeUp::kLayers] = {};
    taps[layers.begin] = layers.tap;
    const int64_t T = int64_t(ids.size()), N = int64_t(wanted.size());
    Floats workspace(size_t(foredraft_workspace_size(&made_.model, T, N, most, threads)), NAN);
    double seconds[kNumPhases];
    std::vector<ForedraftDraw> draws;
    for (int64_t n = 0; n < N; ++n) draws.push_back({n, uint64_t(n), 7, n % 2 ? 0.9 : 0.0, -2, -2, 0});
    const ForedraftForward forward{
        T, N, int64_t(rows.size()), most, ids.data(), positions.data(), entries.data(),
        tables.data(), prefixes.data(), extra_starts.data(), extras.data(), wanted.data(),
        spans.data(), {stores_[0], stores_[1]}, kBlockEntries, logits.data(), layers.begin, layers.end,
        layers.hidden, taps, workspace.data(), threads, seconds, N, draws.data(), 0,
        made_.int8_entries};
    if (foredraft_forward(&made_.model, &forward) != kDone) std::abort();
    for (const ForedraftDraw& found : draws) {
      ForedraftDraw alone = found;
      noise::draw(logits.data(), made_.model.vocab, alone);
      if (found.token < 0 || found.token != alone.token || found.best != alone.best) std::abort();
    }
    return logits;
  }

  Floats forward(const std::vector<Row>& rows, int threads) { return forward(rows, threads, {}); }

 private:
  const MadeUp& made_;
  ForedraftStore stores_[2];
  std::vector<uint8_t> halves_[2][2];  // keys and values of each kind of layers
  Numbers tables_[2];
};

// Tokens [begin, end) of a text.
Row chain(int slot, const Numbers& text, int64_t begin, int64_t end) {
  Row row{slot, {}};
  for (int32_t i = int32_t(begin); i < end; ++i)
    row.tokens.push_back({text[size_t(i)], i, i, i + 1, {}});
  return row;
}

// ---- ways to feed -------------------------------------------------------------------------------

const Numbers kTreeTokens{7, 8, 9, 8, 10, 11, 8, 3}, kTreeParents{-1, -1, 0, 0, 1, 2, 4, 4};

class Ways {
 public:
  Ways(const Model& model, const Sizes& sizes, Kind kind)
      : model_(model), made_(model, sizes, kind), V_(size_t(sizes.vocab)) {
    std::mt19937 random(5);
    for (int64_t i = 0; i < kPrompt + 40; ++i) text_.push_back(int32_t(random() % unsigned(sizes.vocab)));
    Cache cache(made_);
    expected_ = alone(cache, text_, 0);
    expected_tree_.resize(kTreeTokens.size() * V_);
    for (size_t node = 0; node < kTreeTokens.size(); ++node) {
      Numbers path(text_.begin(), text_.begin() + kPrompt);
      for (int32_t i = int32_t(node); i >= 0; i = kTreeParents[size_t(i)])
        path.insert(path.begin() + kPrompt, kTreeTokens[size_t(i)]);
      const Floats found = alone(cache, path, kPrompt);
      std::copy(found.end() - int64_t(V_), found.end(), expected_tree_.begin() + int64_t(node * V_));
    }
  }

  void check(int threads) const {
    in_chunks(threads);
    in_company(threads);
    in_two_parts(threads);
  }

  // Two threads of a program at once, each with memory of its own.
  void check_side_by_side() const {
    std::thread other([&] { in_company(2); });
    in_company(3);
    other.join();
  }

  uint64_t hash() const {
    uint64_t hash = 1469598103934665603u;  // FNV-1a
    for (const Floats* all : {&expected_, &expected_tree_})
      for (float value : *all) {
        if (!std::isfinite(value)) std::abort();
        uint32_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        hash = (hash ^ bits) * 1099511628211u;
      }
    return hash;
  }

 private:
  const Model& model_;
  const MadeUp made_;
  const size_t V_;
  Numbers text_;
  Floats expected_, expected_tree_;  // [tokens, V], [nodes, V]

  Floats alone(Cache& cache, const Numbers& text, size_t begin) const {
    Floats all;
    for (size_t i = begin; i < text.size(); ++i) {
      const Floats found = cache.forward({chain(0, text, int64_t(i), int64_t(i) + 1)}, 1);
      all.insert(all.end(), found.begin(), found.end());
    }
    return all;
  }

  void in_chunks(int threads) const {
    Cache cache(made_);
    int64_t begin = 0;
    for (int64_t size : {33, 1, 2, 8, 5, 246, 17, 16, 2}) {
      const Floats found = cache.forward({chain(0, text_, begin, begin + size)}, threads);
      expect("a chunk", threads, found, 0, size, expected_, begin);
      begin += size;
    }
  }

  // A tree, and a chunk of another row.
  void in_company(int threads) const {
    Cache cache(made_);
    cache.forward({chain(1, text_, 0, kPrompt)}, threads);
    cache.forward({chain(0, text_, 0, 20)}, threads);
    const int64_t num_nodes = int64_t(kTreeTokens.size());
    const Floats found = cache.forward({chain(0, text_, 20, 29), tree(1)}, threads);
    expect("a row", threads, found, 0, 9, expected_, 20);
    expect("a tree", threads, found, 9, num_nodes, expected_tree_, 0);
  }

  // The first layer, and the others from what it gave.
  void in_two_parts(int threads) const {
    Cache cache(made_);
    constexpr int64_t kCount = 40;
    const std::vector<Row> rows{chain(0, text_, 0, kCount)};
    Floats hidden(size_t(kCount * made_.model.hidden));
    cache.forward(rows, threads, {0, 1, nullptr, hidden.data()});
    const Floats found = cache.forward(rows, threads, {1, MadeUp::kLayers, hidden.data(), nullptr});
    expect("two parts", threads, found, 0, kCount, expected_, 0);
  }

  static Row tree(int slot) {
    Row row{slot, {}};
    for (int32_t i = 0; i < int32_t(kTreeTokens.size()); ++i) {
      Token node{kTreeTokens[size_t(i)], int32_t(kPrompt) - 1, int32_t(kPrompt) + i, kPrompt, {}};
      for (int32_t seen = i; seen >= 0; seen = kTreeParents[size_t(seen)]) {
        node.extras.insert(node.extras.begin(), int32_t(kPrompt) + seen);
        ++node.position;
      }
      row.tokens.push_back(node);
    }
    return row;
  }

  void expect(const char* what, int threads, const Floats& found, int64_t at, int64_t count,
              const Floats& expected, int64_t from) const {
    const size_t bytes = size_t(count) * V_ * sizeof(float);
    const float* wanted = expected.data() + size_t(from) * V_;
    if (std::memcmp(found.data() + size_t(at) * V_, wanted, bytes) == 0) return;
    std::fprintf(stderr, "%s, %s, %d threads: other bits than alone\n", model_.name, what, threads);
    std::exit(1);
  }
};

}  // namespace

// The most threads of a forward.
int main(int, char** arguments) {
  const int most_threads = std::atoi(arguments[1]);
  // The kinds differ in what lies around products, and formats in products alone.
  const std::vector<Model> in_all_kinds{{"float32", false, kFormPlain},
                                        {"bfloat16", true, kFormPlain},
                                        {"bfloat16 int4", true, kFormPacked, kInt4},
                                        {"bfloat16 mixed", true, kFormPacked, kNested4, kNested5, true}};
  std::vector<Model> as_llama{
      {"float32 int8", false, kFormPacked},
      {"bfloat16 int8", true, kFormPacked},
      {"bfloat16 with minima", true, kFormPacked, kInt5, kNested6},
      {"bfloat16 mixed by bytes", true, kFormPacked, kNested4, kInt4, true, false, true},
      {"bfloat16 over int8", true, kFormPlain, kInt8, kInt8, false, true},
      {"bfloat16 centred over int8", true, kFormPacked, kCentred4, kInt8, false, true}};
  const Sizes even{64, 96, 4, 2, 16, 70}, awkward{45, 70, 5, 1, 10, 51};
  const auto check = [&](const Model& model, Kind kind, const Sizes& sizes) {
    const Ways ways(model, sizes, kind);
    for (int threads : {1, most_threads}) ways.check(threads);
    ways.check_side_by_side();  // in two threads, and in three
    std::printf("%s: %016llx\n", model.name, static_cast<unsigned long long>(ways.hash()));
  };
  for (const Model& model : in_all_kinds)
    for (Kind kind : {kWindows, kPostNorms, kExperts, kGemma4, kLatents})
      check(model, kind, kind == kPostNorms ? even : awkward);
  check({"int8 latents", true, kFormPacked, kInt8, kInt8, false, true}, kLatents, even);
  for (bool is_bf16 : {true, false})
    check({"packed experts", is_bf16, kFormPlain, kFp4, kFp4, false, false, false, true}, kExperts, awkward);
  as_llama.insert(as_llama.end(), in_all_kinds.begin(), in_all_kinds.end());
  if (kTiles && tiles_allowed()) {
    const Model tiles{"bfloat16 tiles", true, kFormTiled};  // whose attention knows no windows
    for (Kind kind : {kPostNorms, kExperts}) check(tiles, kind, kind == kPostNorms ? even : awkward);
    for (const Sizes& sizes : {even, awkward}) check(tiles, kLatents, sizes);
    as_llama.push_back(tiles);
    as_llama.push_back({"bfloat16 tiles over int8", true, kFormTiled, kInt8, kInt8, false, true});
  }
  for (const Model& model : as_llama)
    for (const Sizes& sizes : {even, awkward}) check(model, kLlama, sizes);
}
