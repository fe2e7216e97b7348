#include "layers/decoder.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/operators.h"
#include "base/rows.h"
#include "base/tensor.h"
#include "layers/torch_math.h"

namespace twostep {
namespace {

constexpr int64_t kFewTokens = 64;

// The batch of attention, as in engine/attention/metadata.py, with the block tables of each group of layers.
struct Sequences {
  std::vector<Tensor> block_tables;
  Tensor cu_seqlens_q, context_lens;

  // Returns these tokens as sequences of one token each; `positions` are those of all tokens.
  Sequences of_tokens(const Tensor& tokens, const Tensor& positions) const {
    const Tensor which = tokens.contiguous(), where = positions.contiguous(), firsts = cu_seqlens_q.contiguous();
    const int64_t count = which.numel();
    const Tensor owners = new_empty_like(which), lens = new_empty({count}, context_lens.scalar_type());
    const auto *token = which.const_data_ptr<int64_t>(), *position = where.const_data_ptr<int64_t>();
    const auto* starts = firsts.const_data_ptr<int32_t>();
    for (int64_t i = 0; i < count; ++i) {
      const auto* next = std::upper_bound(starts, starts + firsts.numel(), token[i]);
      owners.mutable_data_ptr<int64_t>()[i] = next - starts - 1;
      lens.mutable_data_ptr<int32_t>()[i] = position[token[i]] + 1;
    }
    std::vector<Tensor> tables;
    for (const Tensor& each : block_tables) tables.push_back(take_rows(each, owners));
    return {tables, torch_math::range(0, count + 1, cu_seqlens_q.scalar_type()), lens};
  }
};

}  // namespace

std::tuple<Tensor, OptionalTensor, OptionalTensor, OptionalTensor> before_attention(
    const Attention& layer, const Tensor& x, const Tensor& cos, const Tensor& sin, const OptionalTensor& query_scales) {
  Workspace work;
  const auto if_any = [](const Tensor& rows) { return rows.defined() ? OptionalTensor(rows) : std::nullopt; };
  const Heads heads = layer.project(layer.normed(x[0]), {cos, sin, query_scales}, work, {});
  return {heads.query, if_any(heads.key), if_any(heads.value), if_any(heads.gates)};
}

Tensor finish_latents(const LatentAttention& layer, const Tensor& attended) {
  return layer.finished(attended.flatten(1), {});
}

Tensor after_attention(const AfterAttention& layer, const Tensor& x, const Tensor& attended,
                       const OptionalTensor& gates, const OptionalTensor& layer_input) {
  Workspace work;
  const Tensor mixed = gated(attended.flatten(1), gates.value_or(Tensor()));
  const auto [residual, added] = layer(x[0], mixed, work, {});
  if (!layer.end) return add_rows(residual, added).unsqueeze(0);
  const OptionalTensor input = layer_input ? OptionalTensor((*layer_input)[0]) : std::nullopt;
  return (**layer.end)(residual, added, input, work, {}).unsqueeze(0);
}

Ref<Layer> layer_of(std::optional<Ref<BeforeAttention>> heads, std::optional<Ref<LatentAttention>> latents,
                    Ref<AfterAttention> after, Tensor keys, Tensor values, int64_t group, double scaling,
                    std::optional<int64_t> sliding_window, std::optional<double> softcap, OptionalTensor sinks,
                    int64_t rotation, std::optional<int64_t> source) {
  TWOSTEP_CHECK(heads.has_value() != latents.has_value(), "a layer has attention of one kind");
  const Ref<Attention> before = heads ? Ref<Attention>(*heads) : Ref<Attention>(*latents);
  return std::make_shared<Layer>(before, std::move(after), std::move(keys), std::move(values), group, scaling,
                                 sliding_window, softcap, std::move(sinks), rotation, source);
}

Decoder::Decoder(Tensor embedding, ranks::OptionalGather embedding_columns, std::optional<double> embedding_scale,
                 std::optional<Ref<LayerInputs>> layer_inputs, const std::vector<Ref<Rotation>>& rotations,
                 std::vector<Ref<Layer>> layers, Ref<Norm> last_norm)
    : embed{embedding, std::move(embedding_columns), embedding_scale}, layer_inputs(std::move(layer_inputs)),
      layers(std::move(layers)), last_norm(std::move(last_norm)), lends(this->layers.size()) {
  const Dtype dtype = embed.is_in_blocks() ? kFloat : embedding.scalar_type();
  for (const auto& each : rotations) this->rotations.push_back(each->of(dtype));
  for (size_t i = 0; i < this->layers.size(); ++i) {
    const Layer& layer = *this->layers[i];
    TWOSTEP_CHECK(layer.rotation < rotations.size(), "a layer takes one of ", rotations.size(), " rotations");
    const bool takes_others = layer.before->takes_keys_of_others();
    TWOSTEP_CHECK(layer.source.has_value() == takes_others && layer.source.value_or(-1) < static_cast<int64_t>(i),
                  "a layer has keys of its own, or those of one before it");
    if (layer.source) lends[*layer.source] = true;
    else last_with_keys = i;
  }
}

std::vector<Ref<Linear>> Decoder::linears() const {
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

OptionalNorm Decoder::norm_before(size_t layer) const {
  return layer < layers.size() ? layers[layer]->before->input_norm : OptionalNorm(last_norm);
}

std::vector<Angles> Decoder::angles_of(const Tensor& positions) {
  std::vector<Angles> all;
  for (Rotations& each : rotations) all.push_back(each.of(positions));
  return all;
}

OptionalTensor Decoder::inputs_of_layers(const Tensor& token_ids, const Tensor& x, const AdapterRows& rows) const {
  return layer_inputs ? OptionalTensor((**layer_inputs)(token_ids, x, rows)) : std::nullopt;
}

OptionalTensor Decoder::input_of(const OptionalTensor& of_layers, int64_t layer) const {
  if (!of_layers) return std::nullopt;
  const int64_t size = of_layers->size(1) / static_cast<int64_t>(layers.size());
  return of_layers->narrow(1, layer * size, size);
}

std::tuple<Tensor, OptionalTensor> Decoder::run(const Tensor& token_ids, const Tensor& positions,
                                                const std::vector<Tensor>& block_tables, const Tensor& cu_seqlens_q,
                                                const Tensor& context_lens, const std::vector<Tensor>& slot_mappings,
                                                const OptionalTensor& kept, const std::vector<int64_t>& recorded,
                                                const OptionalTensor& adapters) {
  std::vector<Angles> angles = angles_of(positions);
  const size_t num_layers = layers.size();
  const size_t last_of_all = recorded.empty() ? last_with_keys : num_layers - 1;  // behind it are kept tokens
  Sequences sequences{block_tables, cu_seqlens_q, context_lens};
  AdapterRows rows(adapters);
  Workspace work_of_many, &work = token_ids.numel() <= kFewTokens ? this->work : work_of_many;
  const Buffer returned;
  Tensor x = embed(token_ids);
  OptionalTensor of_layers = inputs_of_layers(token_ids, x, rows);
  const OptionalNorm first_norm = norm_before(0);
  Tensor normed = first_norm ? (**first_norm)(x) : x;
  std::vector<Tensor> inputs;
  std::vector<Heads> lent(num_layers);
  for (size_t i = 0; i < num_layers; ++i) {
    const Layer& layer = *layers[i];
    const auto number = static_cast<int64_t>(i);
    if (std::find(recorded.begin(), recorded.end(), number) != recorded.end()) inputs.push_back(x.clone());
    auto [query, key, value, gates] = layer.before->project(normed, angles[layer.rotation], work, rows);
    if (layer.source) key = lent[*layer.source].key, value = lent[*layer.source].value;
    if (lends[i]) lent[i] = {{}, key.clone(), value.clone()};
    write_kv(key, value, layer.keys, layer.values, slot_mappings.at(layer.group));
    const bool is_last = i + 1 == num_layers;
    if (kept && i == last_of_all) {  // of other tokens only keys and values are needed
      x = take_rows(x, *kept);
      query = take_rows(query.flatten(1), *kept).view({kept->numel(), query.size(1), query.size(2)});
      if (gates.defined()) gates = take_rows(gates, *kept);
      sequences = sequences.of_tokens(*kept, positions);
      rows = rows.taken(*kept);
      if (of_layers) of_layers = take_rows(*of_layers, *kept);
      if (!is_last) angles = angles_of(take_rows(positions.unsqueeze(-1), *kept).squeeze(-1));
    }
    const Tensor attended = paged_attention(query, layer.keys, layer.values, sequences.block_tables.at(layer.group),
                                            sequences.cu_seqlens_q, sequences.context_lens, layer.scaling,
                                            layer.sliding_window, layer.softcap, layer.sinks, work.attended);
    const Tensor mixed = gated(layer.before->finished(attended, work), gates);
    const auto [residual, added] = (*layer.after)(x, mixed, work, rows);
    const OptionalNorm next = norm_before(i + 1);
    const Buffer& to = is_last ? returned : work.normed;
    if (layer.after->end) {
      x = (**layer.after->end)(residual, added, input_of(of_layers, number), work, rows);
      normed = next ? (**next)(x, to) : x;
    } else {
      std::tie(x, normed) = add_and_norm(next, residual, added, work.residual, to);
    }
  }
  return {normed, inputs.empty() ? OptionalTensor() : torch_math::cat(inputs, 1)};
}

}  // namespace twostep
