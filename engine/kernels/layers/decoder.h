// Decoder layers without Python between two matmuls: one layer in two calls, before and after its attention, or all
// layers in one, from token ids to the input of the head. They call the operators that the plain path calls from
// Python, in the same order; in the latter, a layer's last sum and the norm after it are one pass, too.

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "base/ref.h"
#include "base/tensor.h"
#include "layers/decoder_layer.h"
#include "layers/embedding.h"
#include "layers/latent_attention.h"
#include "layers/modules.h"
#include "layers/rotary.h"

namespace twostep {

// x [1, T, H] -> query [T, num_heads, head_size], key and value [T, num_kv_heads, head_size], and gates
std::tuple<Tensor, OptionalTensor, OptionalTensor, OptionalTensor> before_attention(const Attention& layer,
                                                                                    const Tensor& x, const Tensor& cos,
                                                                                    const Tensor& sin,
                                                                                    const OptionalTensor& query_scales);

// attended [T, num_heads, size of a latent] -> [T, num_heads * size of a value]
Tensor finish_latents(const LatentAttention& layer, const Tensor& attended);

// x [1, T, H], attended [T, num_heads, head_size], which gates multiply in its place, layer_input [1, T, N] -> the
// layer's output [1, T, H]
Tensor after_attention(const AfterAttention& layer, const Tensor& x, const Tensor& attended,
                       const OptionalTensor& gates, const OptionalTensor& layer_input);

// A layer with the parameters of its attention, its part of the KV cache, whose group of layers has block tables of its
// own, and the number of its rotation.
struct Layer {
  Ref<Attention> before;
  Ref<AfterAttention> after;
  Tensor keys, values;
  size_t group;
  double scaling;
  std::optional<int64_t> sliding_window;
  std::optional<double> softcap;
  OptionalTensor sinks;
  size_t rotation;
  std::optional<int64_t> source;  // number of the layer whose keys and values it takes

  Layer(Ref<Attention> before, Ref<AfterAttention> after, Tensor keys, Tensor values, int64_t group, double scaling,
        std::optional<int64_t> sliding_window, std::optional<double> softcap, OptionalTensor sinks, int64_t rotation,
        std::optional<int64_t> source)
      : before(std::move(before)), after(std::move(after)), keys(std::move(keys)), values(std::move(values)),
        group(static_cast<size_t>(group)), scaling(scaling), sliding_window(sliding_window), softcap(softcap),
        sinks(std::move(sinks)), rotation(static_cast<size_t>(rotation)), source(source) {}
};

// A layer's attention makes keys and values of all heads, or latents: one of both.
Ref<Layer> layer_of(std::optional<Ref<BeforeAttention>> heads, std::optional<Ref<LatentAttention>> latents,
                    Ref<AfterAttention> after, Tensor keys, Tensor values, int64_t group, double scaling,
                    std::optional<int64_t> sliding_window, std::optional<double> softcap, OptionalTensor sinks,
                    int64_t rotation, std::optional<int64_t> source);

// The angles of a rotary embedding: frequencies [up to half a head], and a factor of the tables.
struct Rotation {
  Tensor frequencies;
  double scaling;
  bool is_rounded;  // whether tables are rounded to the rows' dtype
  bool is_wide;     // whether they are in float32 then
  bool is_polar;    // whether they are parts of complex numbers, whose last bits differ
  OptionalTensor query_scales;
  int64_t interval;  // of positions whose queries have one scale
  int64_t shift;     // by how many positions less the first one has

  Rotation(Tensor frequencies, double scaling, bool is_rounded, bool is_wide, bool is_polar,
           OptionalTensor query_scales, int64_t interval, int64_t shift)
      : frequencies(std::move(frequencies)), scaling(scaling), is_rounded(is_rounded), is_wide(is_wide),
        is_polar(is_polar), query_scales(std::move(query_scales)), interval(interval), shift(shift) {}

  Rotations of(Dtype dtype) const {
    const auto scales = query_scales ? std::optional(QueryScales{*query_scales, interval, shift}) : std::nullopt;
    return Rotations(frequencies, scaling, is_rounded ? std::optional(dtype) : std::nullopt, is_wide ? kFloat : dtype,
                     is_polar, scales);
  }
};

struct Decoder {
  Embedding embed;
  std::optional<Ref<LayerInputs>> layer_inputs;
  std::vector<Rotations> rotations;
  std::vector<Ref<Layer>> layers;
  Ref<Norm> last_norm;
  Workspace work;  // reused by short steps, where allocations would count; not thread-safe

  Decoder(Tensor embedding, ranks::OptionalGather embedding_columns, std::optional<double> embedding_scale,
          std::optional<Ref<LayerInputs>> layer_inputs, const std::vector<Ref<Rotation>>& rotations,
          std::vector<Ref<Layer>> layers, Ref<Norm> last_norm);

  // The linear layers to which adapters may add, in order: each layer's before it attends, its attention's output, and
  // those of its feed-forward part and its end; then that of the layers' own inputs.
  std::vector<Ref<Linear>> linears() const;

  OptionalNorm norm_before(size_t layer) const;

  std::vector<Angles> angles_of(const Tensor& positions);

  // token ids [T], x [T, H] -> the layers' own inputs [T, layers * size], if they have such
  OptionalTensor inputs_of_layers(const Tensor& token_ids, const Tensor& x, const AdapterRows& rows) const;

  // Returns one layer's part of these.
  OptionalTensor input_of(const OptionalTensor& of_layers, int64_t layer) const;

  // token_ids and positions [T], block_tables to slot_mappings as in engine/attention/metadata.py, for each group of
  // layers -> the input of the head, [T, H], or of the `kept` tokens only; and the inputs of the `recorded` layers
  // beside each other, if there are any; `adapters` [T] has the number of each token's adapter, or -1
  std::tuple<Tensor, OptionalTensor> run(const Tensor& token_ids, const Tensor& positions,
                                         const std::vector<Tensor>& block_tables, const Tensor& cu_seqlens_q,
                                         const Tensor& context_lens, const std::vector<Tensor>& slot_mappings,
                                         const OptionalTensor& kept, const std::vector<int64_t>& recorded,
                                         const OptionalTensor& adapters);

  std::vector<bool> lends;    // whether others take the layer's keys and values
  size_t last_with_keys = 0;  // the last layer that has keys and values of its own
};

}  // namespace twostep
