// Registers the parts of a model with torch, as torch.classes.twostep: what holds another part comes after it, since
// torch must know that one's class then.

#include <torch/library.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/ref.h"
#include "binding/torch_types.h"
#include "layers/decoder.h"
#include "layers/part_layers.h"
#include "moe/experts.h"
#include "ranks/exchange.h"

namespace twostep::binding {
namespace {

template <class T>
using Optional = std::optional<Ref<T>>;

using Gathered = ranks::OptionalGather;

void register_ranks(torch::Library& library) {
  using ranks::Exchange, ranks::Gather;
  library.class_<Held<Exchange>>("Exchange")
      .def(made_of<Exchange, int64_t, int64_t, int64_t, int64_t, double>())
      .def("abort", bound<[](const Ref<Exchange>& exchange) { exchange->abort(); }>());
  library.class_<Held<Gather>>("Gather")
      .def(made_of<Gather, Ref<Exchange>, std::vector<int64_t>>())
      .def("run", bound<[](const Ref<Gather>& gather, const Tensor& x) { return (*gather)(x, {}); }>());
  library.def("exchange_size", &Exchange::memory_size);
}

void register_experts(torch::Library& library) {
  using moe::Experts, moe::Gate, moe::Stack;
  library.class_<Held<Stack>>("ExpertStack")
      .def(made_of<Stack, std::vector<Tensor>, OptionalTensor, int64_t, int64_t>())
      .def("multiply_each",
           bound<[](const Ref<Stack>& stack, const Tensor& rows) { return stack->multiply_each(rows); }>());
  library.class_<Held<Gate>>("ExpertGate")
      .def(made_of<Gate, std::string, double, double, bool>())
      .def("run", bound<[](const Ref<Gate>& gate, const Tensor& gate_up) { return (*gate)(gate_up, {}); }>());
  library.class_<Held<Experts>>("Experts")
      .def(made_of<Experts, Ref<Stack>, Ref<Stack>, Ref<Gate>, Gathered, Gathered>())
      .def("run", bound<[](const Ref<Experts>& experts, const Tensor& hidden, const Tensor& chosen,
                           const Tensor& weights) { return experts->run(hidden, chosen, weights); }>());
  library.def("take_experts_read() -> (int, int)", &moe::take_experts_read);
}

template <class Kind>
auto run_before() {
  return bound<[](const Ref<Kind>& layer, const Tensor& x, const Tensor& cos, const Tensor& sin,
                  const OptionalTensor& query_scales) {
    return before_attention(*layer, x, cos, sin, query_scales);
  }>();
}

void register_attention(torch::Library& library) {
  library.class_<Held<Linear>>("Linear")
      .def(made_of<Linear, Tensor, OptionalTensor, int64_t, int64_t, Gathered, Gathered, OptionalTensor>())
      .def("adapt", bound<[](const Ref<Linear>& linear, int64_t adapter, const Tensor& columns, const Tensor& down,
                             const Tensor& up, int64_t rank) { linear->adapt(adapter, columns, down, up, rank); }>())
      .def("release", bound<[](const Ref<Linear>& linear, int64_t adapter) { linear->release(adapter); }>());
  library.class_<Held<Norm>>("Norm").def(made_of<Norm, Tensor, double, bool, OptionalTensor>());
  library.class_<Held<BeforeAttention>>("BeforeAttention")
      .def(made_of<BeforeAttention, OptionalNorm, OptionalNorm, OptionalNorm, OptionalNorm, Ref<Linear>, int64_t,
                   int64_t, std::string, bool, bool, bool>())
      .def("run", run_before<BeforeAttention>());
  library.class_<Held<LatentAttention>>("LatentAttention")
      .def(made_of<LatentAttention, OptionalNorm, Optional<Linear>, OptionalNorm, Ref<Linear>, Ref<Linear>, Ref<Norm>,
                   Ref<moe::Stack>, Ref<moe::Stack>, std::string>())
      .def("run", run_before<LatentAttention>())
      .def("finish", bound<[](const Ref<LatentAttention>& layer, const Tensor& attended) {
             return finish_latents(*layer, attended);
           }>());
}

void register_feed_forward(torch::Library& library) {
  library.class_<Held<Mlp>>("Mlp").def(
      made_of<Mlp, Ref<Linear>, Ref<Linear>, std::string, bool, std::vector<double>>());
  library.class_<Held<Router>>("Router").def(
      made_of<Router, Ref<Linear>, int64_t, std::string, bool, OptionalTensor, int64_t, int64_t, bool, bool, double,
              double, double, bool, OptionalTensor, double>());
  library.class_<Held<MixtureNorms>>("MixtureNorms")
      .def(made_of<MixtureNorms, Ref<Norm>, double, Ref<Norm>, Ref<Norm>, Ref<Norm>>());
  library.class_<Held<Narrowing>>("Narrowing").def(made_of<Narrowing, Ref<Linear>, Ref<Linear>>());
  library.class_<Held<Mixture>>("Mixture").def(
      made_of<Mixture, Ref<Router>, Ref<moe::Experts>, Optional<Mlp>, Optional<Linear>, Optional<MixtureNorms>, bool,
              double, Optional<Narrowing>>());
  library.class_<Held<LayerEnd>>("LayerEnd")
      .def(made_of<LayerEnd, Optional<Linear>, Optional<Linear>, OptionalNorm, double>());
  library.class_<Held<AfterAttention>>("AfterAttention")
      .def(torch::init(bound<&after_attention_of>()))
      .def("run", bound<[](const Ref<AfterAttention>& layer, const Tensor& x, const Tensor& attended,
                           const OptionalTensor& gates, const OptionalTensor& layer_input) {
             return after_attention(*layer, x, attended, gates, layer_input);
           }>());
}

void register_part_layers(torch::Library& library) {
  library.class_<Held<NormedLinear>>("NormedLinear")
      .def(made_of<NormedLinear, Ref<Norm>, Ref<Linear>>())
      .def("run", bound<[](const Ref<NormedLinear>& layer, const Tensor& x) { return layer->run(x); }>());
  library.class_<Held<AddedLinear>>("AddedLinear")
      .def(made_of<AddedLinear, Ref<Linear>>())
      .def("run", bound<[](const Ref<AddedLinear>& layer, const Tensor& x, const Tensor& mixed) {
             return layer->run(x, mixed);
           }>());
  library.class_<Held<AddedFeedForward>>("AddedFeedForward")
      .def(torch::init(bound<&added_feed_forward_of>()))
      .def("run", bound<[](const Ref<AddedFeedForward>& layer, const Tensor& x) { return layer->run(x); }>());
  library.class_<Held<BeforeBoth>>("BeforeBoth")
      .def(made_of<BeforeBoth, Ref<Norm>, Ref<BeforeAttention>, double, Ref<Linear>, double>())
      .def("run", bound<[](const Ref<BeforeBoth>& layer, const Tensor& x, const Tensor& cos, const Tensor& sin) {
             return layer->run(x, cos, sin);
           }>());
  library.class_<Held<AfterBoth>>("AfterBoth")
      .def(made_of<AfterBoth, Ref<AfterAttention>, Ref<Linear>>())
      .def("run", bound<[](const Ref<AfterBoth>& layer, const Tensor& x, const Tensor& attended,
                           const Tensor& mixed) { return layer->run(x, attended, mixed); }>());
}

void register_decoder(torch::Library& library) {
  library.class_<Held<Layer>>("Layer").def(torch::init(bound<&layer_of>()));
  library.class_<Held<Rotation>>("Rotation")
      .def(made_of<Rotation, Tensor, double, bool, bool, bool, OptionalTensor, int64_t, int64_t>());
  library.class_<Held<LayerInputs>>("LayerInputs")
      .def(made_of<LayerInputs, Tensor, std::optional<double>, Ref<Linear>, double, Ref<Norm>, double>());
  library.class_<Held<Decoder>>("Decoder")
      .def(made_of<Decoder, Tensor, Gathered, std::optional<double>, Optional<LayerInputs>, std::vector<Ref<Rotation>>,
                   std::vector<Ref<Layer>>, Ref<Norm>>())
      .def("linears", bound<[](const Ref<Decoder>& decoder) { return decoder->linears(); }>())
      .def("run",
           bound<[](const Ref<Decoder>& decoder, const Tensor& token_ids, const Tensor& positions,
                    const std::vector<Tensor>& block_tables, const Tensor& cu_seqlens_q, const Tensor& context_lens,
                    const std::vector<Tensor>& slot_mappings, const OptionalTensor& kept,
                    const std::vector<int64_t>& recorded, const OptionalTensor& adapters) {
             return decoder->run(token_ids, positions, block_tables, cu_seqlens_q, context_lens, slot_mappings, kept,
                                 recorded, adapters);
           }>());
}

}  // namespace
}  // namespace twostep::binding

TORCH_LIBRARY_FRAGMENT(twostep, library) {
  using namespace twostep::binding;
  register_ranks(library);
  register_experts(library);
  register_attention(library);
  register_feed_forward(library);
  register_part_layers(library);
  register_decoder(library);
}
