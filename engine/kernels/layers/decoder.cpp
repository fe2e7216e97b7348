// Decoder layers without Python between two matmuls: one layer in two calls, before and after its attention, or all
// layers in one, from token ids to the input of the head. They call the operators that the plain path calls from
// Python, in the same order; in the latter, a layer's last sum and the norm after it are one pass, too.

#include <ATen/ATen.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/operators.h"
#include "base/rows.h"
#include "layers/feed_forward.h"
#include "layers/modules.h"
#include "layers/rotary.h"

namespace twostep {
namespace {

struct BeforeAttention : torch::CustomClassHolder {
  OptionalNorm input_norm, query_norm, key_norm;
  Ref<Linear> qkv;
  int64_t num_heads, num_kv_heads;
  bool in_pairs;    // whether neighbours are rotated
  bool norms_last;  // whether what is rotated is normed, and not the other way round

  BeforeAttention(OptionalNorm input_norm, OptionalNorm query_norm, OptionalNorm key_norm, Ref<Linear> qkv,
                  int64_t num_heads, int64_t num_kv_heads, bool in_pairs, bool norms_last)
      : input_norm(std::move(input_norm)), query_norm(std::move(query_norm)), key_norm(std::move(key_norm)),
        qkv(std::move(qkv)), num_heads(num_heads), num_kv_heads(num_kv_heads), in_pairs(in_pairs),
        norms_last(norms_last) {}

  at::Tensor normed(const at::Tensor& x) const { return input_norm ? (**input_norm)(x) : x; }

  // normed [T, H] -> query [T, num_heads, head_size], key and value [T, num_kv_heads, head_size], rotated
  Heads project(const at::Tensor& normed, const Angles& angles, Workspace& work, const AdapterRows& rows) const {
    const auto weight_of = [](const auto& norm) { return norm ? OptionalTensor((*norm)->weight) : std::nullopt; };
    at::Tensor all = (*qkv)(normed, work.qkv, Activation::kNone, rows);
    rotate_heads(all, angles.cos, angles.sin, num_heads, num_kv_heads, weight_of(query_norm), weight_of(key_norm),
                 query_norm ? (*query_norm)->eps : 0.0, in_pairs, norms_last, angles.query_scales);
    return work.heads_of(all, num_heads, num_kv_heads);
  }
};

struct AfterAttention : torch::CustomClassHolder {
  Ref<Linear> attention_out;
  OptionalNorm norm;
  Ref<FeedForward> feed_forward;
  OptionalNorm attention_norm, feed_forward_norm;  // of what either adds to the residual
  std::optional<double> multiplier;                // of that
  bool is_parallel;                                // whether the MLP reads the norm of what attention does, too

  AfterAttention(Ref<Linear> attention_out, OptionalNorm norm, Ref<FeedForward> feed_forward,
                 OptionalNorm attention_norm, OptionalNorm feed_forward_norm, std::optional<double> multiplier,
                 bool is_parallel)
      : attention_out(std::move(attention_out)), norm(std::move(norm)), feed_forward(std::move(feed_forward)),
        attention_norm(std::move(attention_norm)), feed_forward_norm(std::move(feed_forward_norm)),
        multiplier(multiplier), is_parallel(is_parallel) {}

  // x [T, H], attended [T, num_heads * head_size] -> both [T, H]: their sum is the layer's output
  std::tuple<at::Tensor, at::Tensor> operator()(const at::Tensor& x, const at::Tensor& attended, Workspace& work,
                                                const AdapterRows& rows) const {
    const at::Tensor projected =
        finished(attention_norm, (*attention_out)(attended, work.added, Activation::kNone, rows));
    at::Tensor residual, normed;
    if (is_parallel) {
      normed = (**norm)(x, work.normed);
      residual = add_rows(x, projected, work.residual);
    } else {
      std::tie(residual, normed) = add_and_norm(norm, x, projected, work.residual, work.normed);
    }
    return {residual, finished(feed_forward_norm, (*feed_forward)(normed, work, rows))};
  }

 private:
  // Makes of a product what is added to the residual, in its place.
  at::Tensor finished(const OptionalNorm& norm, const at::Tensor& rows) const {
    const at::Tensor normed = norm ? (*norm)->in_place(rows) : rows;
    if (multiplier) scale_rows(normed, *multiplier);
    return normed;
  }
};

// A layer's feed-forward part is an MLP or a mixture: one of both.
Ref<AfterAttention> after_attention_of(Ref<Linear> attention_out, OptionalNorm norm, std::optional<Ref<Mlp>> mlp,
                                       std::optional<Ref<Mixture>> mixture, OptionalNorm attention_norm,
                                       OptionalNorm feed_forward_norm, std::optional<double> multiplier,
                                       bool is_parallel) {
  TORCH_CHECK(mlp.has_value() != mixture.has_value(), "a layer has an MLP or a mixture");
  TORCH_CHECK(norm || !is_parallel, "a layer whose parts are parallel has a norm");
  const Ref<FeedForward> feed_forward = mlp ? Ref<FeedForward>(*mlp) : Ref<FeedForward>(*mixture);
  return c10::make_intrusive<AfterAttention>(std::move(attention_out), std::move(norm), feed_forward,
                                             std::move(attention_norm), std::move(feed_forward_norm), multiplier,
                                             is_parallel);
}

// x [1, T, H] -> query [T, num_heads, head_size], key and value [T, num_kv_heads, head_size]
std::tuple<at::Tensor, at::Tensor, at::Tensor> before_attention(const Ref<BeforeAttention>& layer, const at::Tensor& x,
                                                                const at::Tensor& cos, const at::Tensor& sin,
                                                                const OptionalTensor& query_scales) {
  Workspace work;
  const Heads heads = layer->project(layer->normed(x[0]), {cos, sin, query_scales}, work, {});
  return {heads.query, heads.key, heads.value};
}

// x [1, T, H], attended [T, num_heads, head_size] -> the layer's output [1, T, H]
at::Tensor after_attention(const Ref<AfterAttention>& layer, const at::Tensor& x, const at::Tensor& attended) {
  Workspace work;
  const auto [residual, added] = (*layer)(x[0], attended.flatten(1), work, {});
  return (residual + added).unsqueeze(0);
}

// A linear layer of a norm.
struct NormedLinear : torch::CustomClassHolder {
  Ref<Norm> norm;
  Ref<Linear> linear;

  NormedLinear(Ref<Norm> norm, Ref<Linear> linear) : norm(std::move(norm)), linear(std::move(linear)) {}

  // x [1, T, H] -> [T, N]
  at::Tensor run(const at::Tensor& x) const { return (*linear)((*norm)(x[0]), {}); }
};

// A layer with the parameters of its attention, its part of the KV cache, whose group of layers has block tables of its
// own, and the number of its rotation.
struct Layer : torch::CustomClassHolder {
  Ref<BeforeAttention> before;
  Ref<AfterAttention> after;
  at::Tensor keys, values;
  size_t group;
  double scaling;
  std::optional<int64_t> sliding_window;
  std::optional<double> softcap;
  OptionalTensor sinks;
  size_t rotation;

  Layer(Ref<BeforeAttention> before, Ref<AfterAttention> after, at::Tensor keys, at::Tensor values, int64_t group,
        double scaling, std::optional<int64_t> sliding_window, std::optional<double> softcap, OptionalTensor sinks,
        int64_t rotation)
      : before(std::move(before)), after(std::move(after)), keys(std::move(keys)), values(std::move(values)),
        group(static_cast<size_t>(group)), scaling(scaling), sliding_window(sliding_window), softcap(softcap),
        sinks(std::move(sinks)), rotation(static_cast<size_t>(rotation)) {}
};

// The angles of a rotary embedding: frequencies [up to half a head], and a factor of the tables.
struct Rotation : torch::CustomClassHolder {
  at::Tensor frequencies;
  double scaling;
  bool is_rounded;  // whether tables are rounded to the rows' dtype
  bool is_wide;     // whether they are in float32 then
  OptionalTensor query_scales;
  int64_t interval;  // of positions whose queries have one scale

  Rotation(at::Tensor frequencies, double scaling, bool is_rounded, bool is_wide, OptionalTensor query_scales,
           int64_t interval)
      : frequencies(std::move(frequencies)), scaling(scaling), is_rounded(is_rounded), is_wide(is_wide),
        query_scales(std::move(query_scales)), interval(interval) {}

  Rotations of(at::ScalarType dtype) const {
    const auto scales = query_scales ? std::optional(QueryScales{*query_scales, interval}) : std::nullopt;
    return Rotations(frequencies, scaling, is_rounded ? std::optional(dtype) : std::nullopt,
                     is_wide ? at::kFloat : dtype, scales);
  }
};

struct Decoder : torch::CustomClassHolder {
  at::Tensor embedding;  // [N, H], or packed in blocks
  ranks::OptionalGather embedding_columns;
  std::optional<double> embedding_scale;
  std::vector<Rotations> rotations;
  std::vector<Ref<Layer>> layers;
  Ref<Norm> last_norm;
  Workspace work;  // reused by short steps, where allocations would count; not thread-safe

  // A rank may have some of the embedding's columns, which are gathered.
  Decoder(at::Tensor embedding, ranks::OptionalGather embedding_columns, std::optional<double> embedding_scale,
          const std::vector<Ref<Rotation>>& rotations, std::vector<Ref<Layer>> layers, Ref<Norm> last_norm)
      : embedding(embedding), embedding_columns(std::move(embedding_columns)), embedding_scale(embedding_scale),
        layers(std::move(layers)), last_norm(std::move(last_norm)) {
    const at::ScalarType dtype = is_in_blocks() ? at::kFloat : embedding.scalar_type();
    for (const auto& each : rotations) this->rotations.push_back(each->of(dtype));
    for (const auto& layer : this->layers) {
      TORCH_CHECK(layer->rotation < rotations.size(), "a layer takes one of ", rotations.size(), " rotations");
    }
  }

  bool is_in_blocks() const { return embedding.scalar_type() == at::kByte; }

  // token ids [T] -> [T, H]
  at::Tensor embed(const at::Tensor& token_ids) const {
    at::Tensor rows = is_in_blocks() ? take_block_rows(embedding, token_ids) : take_rows(embedding, token_ids);
    if (embedding_columns) rows = (**embedding_columns)(rows, {});
    if (embedding_scale) scale_rows(rows, *embedding_scale);
    return rows;
  }

  // The linear layers to which adapters may add, in order: each layer's query, key and value, its attention's output,
  // and those of its feed-forward part.
  std::vector<Ref<Linear>> linears() const {
    std::vector<Ref<Linear>> all;
    for (const auto& layer : layers) {
      all.push_back(layer->before->qkv);
      all.push_back(layer->after->attention_out);
      for (const auto& each : layer->after->feed_forward->linears()) all.push_back(each);
    }
    return all;
  }

  OptionalNorm norm_before(size_t layer) const {
    return layer < layers.size() ? layers[layer]->before->input_norm : OptionalNorm(last_norm);
  }
};

constexpr int64_t kFewTokens = 64;

// The batch of attention, as in engine/attention/metadata.py, with the block tables of each group of layers.
struct Sequences {
  std::vector<at::Tensor> block_tables;
  at::Tensor cu_seqlens_q, context_lens;

  // Returns these tokens as sequences of one token each; `positions` are those of all tokens.
  Sequences of_tokens(const at::Tensor& tokens, const at::Tensor& positions) const {
    const at::Tensor which = tokens.contiguous(), where = positions.contiguous(), firsts = cu_seqlens_q.contiguous();
    const int64_t count = which.numel();
    const at::Tensor owners = at::empty_like(which), lens = at::empty({count}, context_lens.options());
    const auto *token = which.const_data_ptr<int64_t>(), *position = where.const_data_ptr<int64_t>();
    const auto* starts = firsts.const_data_ptr<int32_t>();
    for (int64_t i = 0; i < count; ++i) {
      const auto* next = std::upper_bound(starts, starts + firsts.numel(), token[i]);
      owners.mutable_data_ptr<int64_t>()[i] = next - starts - 1;
      lens.mutable_data_ptr<int32_t>()[i] = position[token[i]] + 1;
    }
    std::vector<at::Tensor> tables;
    for (const at::Tensor& each : block_tables) tables.push_back(take_rows(each, owners));
    return {tables, at::arange(count + 1, cu_seqlens_q.options()), lens};
  }
};

// token_ids and positions [T], block_tables to slot_mappings as in engine/attention/metadata.py, for each group of
// layers -> the input of the head, [T, H], or of the `kept` tokens only; and the inputs of the `recorded` layers beside
// each other, if there are any; `adapters` [T] has the number of each token's adapter, or -1
std::tuple<at::Tensor, OptionalTensor> run_decoder(const Ref<Decoder>& decoder, const at::Tensor& token_ids,
                                                   const at::Tensor& positions,
                                                   const std::vector<at::Tensor>& block_tables,
                                                   const at::Tensor& cu_seqlens_q, const at::Tensor& context_lens,
                                                   const std::vector<at::Tensor>& slot_mappings,
                                                   const OptionalTensor& kept,
                                                   const std::vector<int64_t>& recorded,
                                                   const OptionalTensor& adapters) {
  std::vector<Angles> angles;
  for (Rotations& each : decoder->rotations) angles.push_back(each.of(positions));
  const size_t num_layers = decoder->layers.size();
  Sequences sequences{block_tables, cu_seqlens_q, context_lens};
  AdapterRows rows(adapters);
  Workspace work_of_many, &work = token_ids.numel() <= kFewTokens ? decoder->work : work_of_many;
  const Buffer returned;
  at::Tensor x = decoder->embed(token_ids);
  const OptionalNorm first_norm = decoder->norm_before(0);
  at::Tensor normed = first_norm ? (**first_norm)(x) : x;
  std::vector<at::Tensor> inputs;
  for (size_t i = 0; i < num_layers; ++i) {
    const Layer& layer = *decoder->layers[i];
    const auto number = static_cast<int64_t>(i);
    if (std::find(recorded.begin(), recorded.end(), number) != recorded.end()) inputs.push_back(x.clone());
    auto [query, key, value] = layer.before->project(normed, angles[layer.rotation], work, rows);
    write_kv(key, value, layer.keys, layer.values, slot_mappings.at(layer.group));
    const bool is_last = i + 1 == num_layers;
    if (kept && is_last) {  // of other tokens only keys and values are needed
      x = take_rows(x, *kept);
      query = take_rows(query.flatten(1), *kept).view({kept->numel(), query.size(1), query.size(2)});
      sequences = sequences.of_tokens(*kept, positions);
      rows = rows.taken(*kept);
    }
    const at::Tensor attended =
        paged_attention(query, layer.keys, layer.values, sequences.block_tables.at(layer.group),
                        sequences.cu_seqlens_q, sequences.context_lens, layer.scaling, layer.sliding_window,
                        layer.softcap, layer.sinks, work.attended);
    const auto [residual, added] = (*layer.after)(x, attended, work, rows);
    std::tie(x, normed) = add_and_norm(decoder->norm_before(i + 1), residual, added, work.residual,
                                       is_last ? returned : work.normed);
  }
  return {normed, inputs.empty() ? OptionalTensor() : at::cat(inputs, 1)};
}

}  // namespace
}  // namespace twostep

TORCH_LIBRARY_FRAGMENT(twostep, library) {
  using namespace twostep;
  ranks::register_classes(library);
  moe::register_classes(library);
  library.class_<Linear>("Linear")
      .def(torch::init<at::Tensor, OptionalTensor, int64_t, int64_t, ranks::OptionalGather, ranks::OptionalGather>())
      .def("adapt", &Linear::adapt)
      .def("release", &Linear::release);
  library.class_<Norm>("Norm").def(torch::init<at::Tensor, double, bool, OptionalTensor>());
  library.class_<BeforeAttention>("BeforeAttention")
      .def(torch::init<OptionalNorm, OptionalNorm, OptionalNorm, Ref<Linear>, int64_t, int64_t, bool, bool>())
      .def("run", &before_attention);
  library.class_<NormedLinear>("NormedLinear")
      .def(torch::init<Ref<Norm>, Ref<Linear>>())
      .def("run", &NormedLinear::run);
  library.class_<Mlp>("Mlp").def(torch::init<Ref<Linear>, Ref<Linear>, std::string, bool>());
  library.class_<Router>("Router")
      .def(torch::init<Ref<Linear>, int64_t, std::string, bool, OptionalTensor, int64_t, int64_t, bool, bool, double,
                       double, double, bool>());
  library.class_<Mixture>("Mixture")
      .def(torch::init<Ref<Router>, Ref<moe::Experts>, std::optional<Ref<Mlp>>, std::optional<Ref<Linear>>>());
  library.class_<AfterAttention>("AfterAttention")
      .def(torch::init(&after_attention_of))
      .def("run", &after_attention);
  library.class_<Layer>("Layer").def(
      torch::init<Ref<BeforeAttention>, Ref<AfterAttention>, at::Tensor, at::Tensor, int64_t, double,
                  std::optional<int64_t>, std::optional<double>, OptionalTensor, int64_t>());
  library.class_<Rotation>("Rotation").def(torch::init<at::Tensor, double, bool, bool, OptionalTensor, int64_t>());
  library.class_<Decoder>("Decoder")
      .def(torch::init<at::Tensor, ranks::OptionalGather, std::optional<double>, std::vector<Ref<Rotation>>,
                       std::vector<Ref<Layer>>, Ref<Norm>>())
      .def("linears", [](const Ref<Decoder>& decoder) { return decoder->linears(); })
      .def("run", &run_decoder);
}
