// Decoder layers without Python between two matmuls: one layer in two calls, before and after its attention, or all
// layers in one, from token ids to the input of the head. They call the operators that the plain path calls from
// Python, in the same order; in the latter, a layer's last sum and the norm after it are one pass, too.

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <c10/util/Exception.h>
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
#include "base/tensors.h"
#include "layers/decoder_layer.h"
#include "layers/embedding.h"
#include "layers/latent_attention.h"
#include "layers/modules.h"
#include "layers/rotary.h"

namespace twostep {
namespace {

// x [1, T, H] -> query [T, num_heads, head_size], key and value [T, num_kv_heads, head_size], and gates
template <class Kind>
std::tuple<at::Tensor, OptionalTensor, OptionalTensor, OptionalTensor> before_attention(
    const Ref<Kind>& layer, const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
    const OptionalTensor& query_scales) {
  Workspace work;
  const auto if_any = [](const at::Tensor& rows) { return rows.defined() ? OptionalTensor(rows) : std::nullopt; };
  const Heads heads = layer->project(layer->normed(x[0]), {cos, sin, query_scales}, work, {});
  return {heads.query, if_any(heads.key), if_any(heads.value), if_any(heads.gates)};
}

// attended [T, num_heads, size of a latent] -> [T, num_heads * size of a value]
at::Tensor finish_latents(const Ref<LatentAttention>& layer, const at::Tensor& attended) {
  return layer->finished(attended.flatten(1), {});
}

// x [1, T, H], attended [T, num_heads, head_size], which gates multiply in its place, layer_input [1, T, N] -> the
// layer's output [1, T, H]
at::Tensor after_attention(const Ref<AfterAttention>& layer, const at::Tensor& x, const at::Tensor& attended,
                           const OptionalTensor& gates, const OptionalTensor& layer_input) {
  Workspace work;
  const at::Tensor mixed = gated(attended.flatten(1), gates.value_or(at::Tensor()));
  const auto [residual, added] = (*layer)(x[0], mixed, work, {});
  if (!layer->end) return (residual + added).unsqueeze(0);
  const OptionalTensor input = layer_input ? OptionalTensor((*layer_input)[0]) : std::nullopt;
  return (**layer->end)(residual, added, input, work, {}).unsqueeze(0);
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
  Ref<Attention> before;
  Ref<AfterAttention> after;
  at::Tensor keys, values;
  size_t group;
  double scaling;
  std::optional<int64_t> sliding_window;
  std::optional<double> softcap;
  OptionalTensor sinks;
  size_t rotation;
  std::optional<int64_t> source;  // number of the layer whose keys and values it takes

  Layer(Ref<Attention> before, Ref<AfterAttention> after, at::Tensor keys, at::Tensor values, int64_t group,
        double scaling, std::optional<int64_t> sliding_window, std::optional<double> softcap, OptionalTensor sinks,
        int64_t rotation, std::optional<int64_t> source)
      : before(std::move(before)), after(std::move(after)), keys(std::move(keys)), values(std::move(values)),
        group(static_cast<size_t>(group)), scaling(scaling), sliding_window(sliding_window), softcap(softcap),
        sinks(std::move(sinks)), rotation(static_cast<size_t>(rotation)), source(source) {}
};

// A layer's attention makes keys and values of all heads, or latents: one of both.
Ref<Layer> layer_of(std::optional<Ref<BeforeAttention>> heads, std::optional<Ref<LatentAttention>> latents,
                    Ref<AfterAttention> after, at::Tensor keys, at::Tensor values, int64_t group, double scaling,
                    std::optional<int64_t> sliding_window, std::optional<double> softcap, OptionalTensor sinks,
                    int64_t rotation, std::optional<int64_t> source) {
  TORCH_CHECK(heads.has_value() != latents.has_value(), "a layer has attention of one kind");
  const Ref<Attention> before = heads ? Ref<Attention>(*heads) : Ref<Attention>(*latents);
  return c10::make_intrusive<Layer>(before, std::move(after), std::move(keys), std::move(values), group, scaling,
                                    sliding_window, softcap, std::move(sinks), rotation, source);
}

// The angles of a rotary embedding: frequencies [up to half a head], and a factor of the tables.
struct Rotation : torch::CustomClassHolder {
  at::Tensor frequencies;
  double scaling;
  bool is_rounded;  // whether tables are rounded to the rows' dtype
  bool is_wide;     // whether they are in float32 then
  bool is_polar;    // whether they are parts of complex numbers, whose last bits differ
  OptionalTensor query_scales;
  int64_t interval;  // of positions whose queries have one scale
  int64_t shift;     // by how many positions less the first one has

  Rotation(at::Tensor frequencies, double scaling, bool is_rounded, bool is_wide, bool is_polar,
           OptionalTensor query_scales, int64_t interval, int64_t shift)
      : frequencies(std::move(frequencies)), scaling(scaling), is_rounded(is_rounded), is_wide(is_wide),
        is_polar(is_polar), query_scales(std::move(query_scales)), interval(interval), shift(shift) {}

  Rotations of(at::ScalarType dtype) const {
    const auto scales = query_scales ? std::optional(QueryScales{*query_scales, interval, shift}) : std::nullopt;
    return Rotations(frequencies, scaling, is_rounded ? std::optional(dtype) : std::nullopt,
                     is_wide ? at::kFloat : dtype, is_polar, scales);
  }
};

struct Decoder : torch::CustomClassHolder {
  Embedding embed;
  std::optional<Ref<LayerInputs>> layer_inputs;
  std::vector<Rotations> rotations;
  std::vector<Ref<Layer>> layers;
  Ref<Norm> last_norm;
  Workspace work;  // reused by short steps, where allocations would count; not thread-safe

  Decoder(at::Tensor embedding, ranks::OptionalGather embedding_columns, std::optional<double> embedding_scale,
          std::optional<Ref<LayerInputs>> layer_inputs, const std::vector<Ref<Rotation>>& rotations,
          std::vector<Ref<Layer>> layers, Ref<Norm> last_norm)
      : embed{embedding, std::move(embedding_columns), embedding_scale}, layer_inputs(std::move(layer_inputs)),
        layers(std::move(layers)), last_norm(std::move(last_norm)), lends(this->layers.size()) {
    const at::ScalarType dtype = embed.is_in_blocks() ? at::kFloat : embedding.scalar_type();
    for (const auto& each : rotations) this->rotations.push_back(each->of(dtype));
    for (size_t i = 0; i < this->layers.size(); ++i) {
      const Layer& layer = *this->layers[i];
      TORCH_CHECK(layer.rotation < rotations.size(), "a layer takes one of ", rotations.size(), " rotations");
      const bool takes_others = layer.before->takes_keys_of_others();
      TORCH_CHECK(layer.source.has_value() == takes_others && layer.source.value_or(-1) < static_cast<int64_t>(i),
                  "a layer has keys of its own, or those of one before it");
      if (layer.source) lends[*layer.source] = true;
      else last_with_keys = i;
    }
  }

  // The linear layers to which adapters may add, in order: each layer's before it attends, its attention's output, and
  // those of its feed-forward part and its end; then that of the layers' own inputs.
  std::vector<Ref<Linear>> linears() const {
    std::vector<Ref<Linear>> all;
    for (const auto& layer : layers) {
      for (const auto& each : layer->before->linears()) all.push_back(each);
      all.push_back(layer->after->attention_out);
      for (const auto& each : layer->after->feed_forward->linears()) all.push_back(each);
      for (const auto& each : layer->after->linears_of_end()) all.push_back(each);
    }
    if (layer_inputs) all.push_back((*layer_inputs)->projection);
    return all;
  }

  OptionalNorm norm_before(size_t layer) const {
    return layer < layers.size() ? layers[layer]->before->input_norm : OptionalNorm(last_norm);
  }

  std::vector<Angles> angles_of(const at::Tensor& positions) {
    std::vector<Angles> all;
    for (Rotations& each : rotations) all.push_back(each.of(positions));
    return all;
  }

  // token ids [T], x [T, H] -> the layers' own inputs [T, layers * size], if they have such
  OptionalTensor inputs_of_layers(const at::Tensor& token_ids, const at::Tensor& x, const AdapterRows& rows) const {
    return layer_inputs ? OptionalTensor((**layer_inputs)(token_ids, x, rows)) : std::nullopt;
  }

  // Returns one layer's part of these.
  OptionalTensor input_of(const OptionalTensor& of_layers, int64_t layer) const {
    if (!of_layers) return std::nullopt;
    const int64_t size = of_layers->size(1) / static_cast<int64_t>(layers.size());
    return of_layers->narrow(1, layer * size, size);
  }

  std::vector<bool> lends;    // whether others take the layer's keys and values
  size_t last_with_keys = 0;  // the last layer that has keys and values of its own
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
    const at::Tensor owners = new_empty_like(which), lens = new_empty({count}, context_lens.options());
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
  std::vector<Angles> angles = decoder->angles_of(positions);
  const size_t num_layers = decoder->layers.size();
  const size_t last_of_all = recorded.empty() ? decoder->last_with_keys : num_layers - 1;  // behind it are kept tokens
  Sequences sequences{block_tables, cu_seqlens_q, context_lens};
  AdapterRows rows(adapters);
  Workspace work_of_many, &work = token_ids.numel() <= kFewTokens ? decoder->work : work_of_many;
  const Buffer returned;
  at::Tensor x = decoder->embed(token_ids);
  OptionalTensor of_layers = decoder->inputs_of_layers(token_ids, x, rows);
  const OptionalNorm first_norm = decoder->norm_before(0);
  at::Tensor normed = first_norm ? (**first_norm)(x) : x;
  std::vector<at::Tensor> inputs;
  std::vector<Heads> lent(num_layers);
  for (size_t i = 0; i < num_layers; ++i) {
    const Layer& layer = *decoder->layers[i];
    const auto number = static_cast<int64_t>(i);
    if (std::find(recorded.begin(), recorded.end(), number) != recorded.end()) inputs.push_back(x.clone());
    auto [query, key, value, gates] = layer.before->project(normed, angles[layer.rotation], work, rows);
    if (layer.source) key = lent[*layer.source].key, value = lent[*layer.source].value;
    if (decoder->lends[i]) lent[i] = {{}, key.clone(), value.clone()};
    write_kv(key, value, layer.keys, layer.values, slot_mappings.at(layer.group));
    const bool is_last = i + 1 == num_layers;
    if (kept && i == last_of_all) {  // of other tokens only keys and values are needed
      x = take_rows(x, *kept);
      query = take_rows(query.flatten(1), *kept).view({kept->numel(), query.size(1), query.size(2)});
      if (gates.defined()) gates = take_rows(gates, *kept);
      sequences = sequences.of_tokens(*kept, positions);
      rows = rows.taken(*kept);
      if (of_layers) of_layers = take_rows(*of_layers, *kept);
      if (!is_last) angles = decoder->angles_of(positions.index_select(0, *kept));
    }
    const at::Tensor attended =
        paged_attention(query, layer.keys, layer.values, sequences.block_tables.at(layer.group),
                        sequences.cu_seqlens_q, sequences.context_lens, layer.scaling, layer.sliding_window,
                        layer.softcap, layer.sinks, work.attended);
    const at::Tensor mixed = gated(layer.before->finished(attended, work), gates);
    const auto [residual, added] = (*layer.after)(x, mixed, work, rows);
    const OptionalNorm next = decoder->norm_before(i + 1);
    const Buffer& to = is_last ? returned : work.normed;
    if (layer.after->end) {
      x = (**layer.after->end)(residual, added, decoder->input_of(of_layers, number), work, rows);
      normed = next ? (**next)(x, to) : x;
    } else {
      std::tie(x, normed) = add_and_norm(next, residual, added, work.residual, to);
    }
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
      .def(torch::init<OptionalNorm, OptionalNorm, OptionalNorm, OptionalNorm, Ref<Linear>, int64_t, int64_t,
                       std::string, bool, bool, bool>())
      .def("run", &before_attention<BeforeAttention>);
  library.class_<LatentAttention>("LatentAttention")
      .def(torch::init<OptionalNorm, std::optional<Ref<Linear>>, OptionalNorm, Ref<Linear>, Ref<Linear>, Ref<Norm>,
                       Ref<moe::Stack>, Ref<moe::Stack>, std::string>())
      .def("run", &before_attention<LatentAttention>)
      .def("finish", &finish_latents);
  library.class_<NormedLinear>("NormedLinear")
      .def(torch::init<Ref<Norm>, Ref<Linear>>())
      .def("run", &NormedLinear::run);
  library.class_<Mlp>("Mlp").def(torch::init<Ref<Linear>, Ref<Linear>, std::string, bool, std::vector<double>>());
  library.class_<Router>("Router")
      .def(torch::init<Ref<Linear>, int64_t, std::string, bool, OptionalTensor, int64_t, int64_t, bool, bool, double,
                       double, double, bool, OptionalTensor, double>());
  library.class_<MixtureNorms>("MixtureNorms").def(torch::init<Ref<Norm>, double, Ref<Norm>, Ref<Norm>, Ref<Norm>>());
  library.class_<Mixture>("Mixture")
      .def(torch::init<Ref<Router>, Ref<moe::Experts>, std::optional<Ref<Mlp>>, std::optional<Ref<Linear>>,
                       std::optional<Ref<MixtureNorms>>, bool, double>());
  library.class_<LayerEnd>("LayerEnd")
      .def(torch::init<std::optional<Ref<Linear>>, std::optional<Ref<Linear>>, OptionalNorm, double>());
  library.class_<AfterAttention>("AfterAttention")
      .def(torch::init(&after_attention_of))
      .def("run", &after_attention);
  library.class_<Layer>("Layer").def(torch::init(&layer_of));
  library.class_<Rotation>("Rotation").def(
      torch::init<at::Tensor, double, bool, bool, bool, OptionalTensor, int64_t, int64_t>());
  library.class_<LayerInputs>("LayerInputs")
      .def(torch::init<at::Tensor, std::optional<double>, Ref<Linear>, double, Ref<Norm>, double>());
  library.class_<Decoder>("Decoder")
      .def(torch::init<at::Tensor, ranks::OptionalGather, std::optional<double>, std::optional<Ref<LayerInputs>>,
                       std::vector<Ref<Rotation>>, std::vector<Ref<Layer>>, Ref<Norm>>())
      .def("linears", [](const Ref<Decoder>& decoder) { return decoder->linears(); })
      .def("run", &run_decoder);
}
