// Registers the operators with torch, as torch.ops.twostep; base/operators.h and recurrent/operators.h say what they
// do.

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <cstdint>
#include <optional>
#include <string_view>

#include "attention/caches.h"
#include "base/activations.h"
#include "base/operators.h"
#include "base/tensor.h"
#include "binding/torch_types.h"
#include "layers/elementwise.h"
#include "recurrent/operators.h"

namespace twostep {
namespace {

using binding::bound;

// Torch warns whenever one of its own kernels is replaced, which is intended here.
struct Quiet : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// Torch's operators that write into their argument return it.
template <auto kFunction, class... Args>
auto in_place(void (*)(const Tensor&, Args...)) {
  return [](at::Tensor& x, Args... args) -> at::Tensor& { return kFunction(x, args...), x; };
}
template <auto kFunction>
auto in_place() {
  return in_place<kFunction>(kFunction);
}

at::Tensor softplus(const at::Tensor& x, const at::Scalar& beta, const at::Scalar& threshold) {
  const bool is_scaled = beta.toDouble() != 1.0;
  const at::Tensor scaled = is_scaled ? x.mul(beta) : x, unscaled = elementwise::softplus(scaled);
  const at::Tensor result = is_scaled ? unscaled.div(beta) : unscaled;
  // Above 20, x is the result in any case.
  return threshold.toDouble() < 20.0 ? x.where(scaled.gt(threshold), result) : result;
}

// Replaces torch's activations of CPU tensors, process-wide, so that model code need not be changed wherever it calls
// them.
void replace_activations() {
  static Quiet quiet;
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__);
  static const bool done = [] {
    library.impl("silu", bound<&elementwise::silu>());
    library.impl("silu_", in_place<&elementwise::silu_in_place>());
    library.impl("sigmoid", bound<&elementwise::sigmoid>());
    library.impl("sigmoid_", in_place<&elementwise::sigmoid_in_place>());
    library.impl("gelu", bound<&elementwise::gelu>());
    library.impl("gelu_", in_place<&elementwise::gelu_in_place>());
    library.impl("softplus", &softplus);
    return true;
  }();
  static_cast<void>(done);
}

}  // namespace
}  // namespace twostep

TORCH_LIBRARY_FRAGMENT(twostep, library) {
  library.def("replace_activations() -> ()", &twostep::replace_activations);
  library.def(
      "paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor cu_seqlens_q, "
      "Tensor context_lens, float scaling, int? sliding_window, float? softcap, Tensor? sinks) -> Tensor");
  library.def(
      "choose_slots(Tensor query, Tensor weights, Tensor index_keys, Tensor block_tables, Tensor cu_seqlens_q, "
      "Tensor context_lens, int num_chosen) -> Tensor");
  library.def(
      "write_kv(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping) -> ()");

  library.def("pack_blocks(Tensor[] rows, int[] kinds, bool for_integers=False) -> Tensor?");
  library.def("expand_blocks(Tensor rows, int kind) -> Tensor");
  library.def("take_block_rows(Tensor packed, Tensor numbers) -> Tensor");

  library.def("square_relu(Tensor(a!) x) -> ()");
  library.def("gelu_new(Tensor(a!) x) -> ()");
  library.def("xielu(Tensor(a!) x, float positive, float negative, float slope, float bound) -> ()");

  library.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  library.def("add_rms_norm(Tensor residual, Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)");
  library.def("layer_norm(Tensor x, Tensor weight, Tensor? bias, float eps) -> Tensor");
  library.def("norm_heads(Tensor(a!) heads, Tensor weight, Tensor? bias, float eps) -> ()");
  library.def(
      "rotate_heads(Tensor(a!) qkv, Tensor cos, Tensor sin, int num_heads, int num_kv_heads, Tensor? query_norm, "
      "Tensor? key_norm, float eps, bool in_pairs=False, bool norms_last=False, Tensor? query_scales=None) -> ()");
  library.def("gate(Tensor gate_up, str activation) -> Tensor");
  library.def("scale_columns(Tensor(a!) x, Tensor factors) -> ()");

  library.def("pack_weight(Tensor weight, bool may_be_coded=True) -> Tensor");
  library.def("linear(Tensor x, Tensor packed, Tensor? bias, int out_features) -> Tensor");

  library.def("quantize(Tensor weight, int bits, int num_refits) -> (Tensor, Tensor, Tensor)");
  library.def("to_levels(Tensor weight, Tensor scales, Tensor minimums) -> (Tensor, Tensor, Tensor)");
  library.def("pack_int8(Tensor codes, Tensor scales, Tensor minimums) -> Tensor");
  library.def("pack_int4(Tensor codes, Tensor levels, Tensor scales) -> Tensor");
  library.def("quantize_and_pack(Tensor weight, int bits, int row_bits, int num_refits) -> (Tensor, bool)");
  library.def("inverse_hadamard(Tensor weight) -> Tensor");
  library.def("linear_int8(Tensor x, Tensor packed, Tensor? bias, int out_features) -> Tensor");
  library.def("linear_int8_wide_rows(Tensor x, Tensor packed, Tensor? bias, int out_features) -> Tensor");
  library.def("linear_int4(Tensor x, Tensor packed, Tensor? bias, int out_features) -> Tensor");

  library.def(
      "causal_convolution(Tensor x, Tensor weight, Tensor? bias, bool is_gated, Tensor(a!) states, Tensor slots, "
      "Tensor starts) -> Tensor");
  library.def(
      "short_convolution(Tensor rows, Tensor weight, Tensor? bias, Tensor(a!) states, Tensor slots, Tensor starts) -> "
      "Tensor");

  library.def("multiply_by_gates(Tensor(a!) x, Tensor gates, str activation) -> ()");
  library.def("gated_group_norm(Tensor(a!) x, Tensor gates, Tensor weight, float eps, int num_groups) -> Tensor");

  library.def("gated_reads(Tensor x, Tensor gates) -> Tensor");

  library.def(
      "linear_attention(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor? rate, Tensor(a!) states, "
      "Tensor slots, Tensor starts) -> Tensor");
  library.def(
      "delta_gates(Tensor write, Tensor time_step, Tensor decay_rates, Tensor time_bias) -> (Tensor, Tensor)");
  library.def(
      "gated_delta_rule(Tensor qkv, Tensor write, Tensor time_step, Tensor decay_rates, Tensor time_bias, "
      "int num_groups, Tensor(a!) states, Tensor slots, Tensor starts) -> Tensor");

  library.def(
      "mamba2_gates(Tensor time_step, Tensor decay_rates, Tensor time_bias, float least_time, float most_time) -> "
      "(Tensor, Tensor)");
  library.def(
      "mamba2_scan(Tensor rows, Tensor time_step, Tensor decay_rates, Tensor time_bias, Tensor skip, float least_time, "
      "float most_time, int num_groups, Tensor(a!) states, Tensor slots, Tensor starts) -> Tensor");

  library.def(
      "mamba2_layer(Tensor rows, Tensor taps, Tensor? bias, Tensor decay_rates, Tensor time_bias, Tensor skip, "
      "float least_time, float most_time, int num_groups, Tensor? norm_weight, float eps, Tensor(a!) window, "
      "Tensor(b!) states, Tensor slots, Tensor starts) -> Tensor");

  library.def(
      "real_gated_recurrence(Tensor x, Tensor gates, Tensor rates, Tensor is_first, Tensor(a!) states, Tensor slots, "
      "Tensor starts) -> Tensor");

  library.def(
      "selective_scan(Tensor x, Tensor time_step, Tensor rates, Tensor write, Tensor read, Tensor(a!) states, "
      "Tensor slots, Tensor starts) -> Tensor");

  library.def("argmax(Tensor logits) -> Tensor");
  library.def("draw_tokens(Tensor logits, Tensor likeliest, Tensor controls) -> Tensor");
  library.def("token_weights(Tensor logits, float largest, float temperature) -> Tensor");
  library.def("score_tokens(Tensor logits, Tensor tokens, int num_top) -> (Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(twostep, CPU, library) {
  using namespace twostep;
  using binding::bound;
  library.impl("paged_attention",
               bound<[](const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
                        const Tensor& block_tables, const Tensor& cu_seqlens_q, const Tensor& context_lens,
                        double scaling, std::optional<int64_t> sliding_window, std::optional<double> softcap,
                        const std::optional<Tensor>& sinks) {
                 return paged_attention(query, key_cache, value_cache, block_tables, cu_seqlens_q, context_lens,
                                        scaling, sliding_window, softcap, sinks)
                     .view({query.size(0), query.size(1), num_numbers(value_cache)});
               }>());
  library.impl("choose_slots", bound<&choose_slots>());
  library.impl("write_kv", bound<&write_kv>());

  library.impl("pack_blocks", bound<&pack_blocks>());
  library.impl("expand_blocks", bound<&expand_blocks>());
  library.impl("take_block_rows", bound<&take_block_rows>());

  library.impl("square_relu", bound<&square_relu>());
  library.impl("gelu_new", bound<&gelu_new>());
  library.impl("xielu", bound<[](const Tensor& x, double positive, double negative, double slope, double bound) {
                 xielu(x, {positive, negative, slope, bound});
               }>());

  library.impl("rms_norm",
               bound<[](const Tensor& x, const Tensor& weight, double eps) { return rms_norm(x, weight, eps); }>());
  library.impl("add_rms_norm", bound<[](const Tensor& residual, const Tensor& x, const Tensor& weight, double eps) {
                 return add_rms_norm(residual, x, weight, eps);
               }>());
  library.impl("layer_norm", bound<[](const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                                      double eps) { return layer_norm(x, weight, bias, eps); }>());
  library.impl("norm_heads", bound<&norm_heads>());
  library.impl("rotate_heads", bound<&rotate_heads>());
  library.impl("gate", bound<[](const Tensor& gate_up, std::string_view activation) {
                 return gate(gate_up, activation_named(activation));
               }>());

  library.impl("scale_columns", bound<&scale_columns>());

  library.impl("pack_weight", bound<&pack_weight>());
  library.impl("linear", bound<[](const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t n) {
                 return linear(x, packed, bias, n);
               }>());

  library.impl("quantize", bound<&quantize>());
  library.impl("to_levels", bound<&to_levels>());
  library.impl("pack_int8", bound<&pack_int8>());
  library.impl("pack_int4", bound<&pack_int4>());
  library.impl("quantize_and_pack", bound<&quantize_and_pack>());
  library.impl("linear_int8", bound<[](const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias,
                                       int64_t n) { return linear_int8(x, packed, bias, n); }>());
  library.impl("inverse_hadamard", bound<&inverse_hadamard>());
  library.impl("linear_int8_wide_rows", bound<&linear_int8_wide_rows>());
  library.impl("linear_int4", bound<[](const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias,
                                       int64_t n) { return linear_int4(x, packed, bias, n); }>());

  library.impl("short_convolution", bound<&recurrent::short_convolution>());
  library.impl("causal_convolution", bound<&recurrent::convolution>());
  library.impl("multiply_by_gates", bound<&recurrent::multiply_by_gates>());
  library.impl("gated_group_norm", bound<&recurrent::gated_group_norm>());
  library.impl("gated_reads", bound<&recurrent::gated_reads>());
  library.impl("linear_attention", bound<&recurrent::linear_attention>());
  library.impl("delta_gates", bound<&recurrent::delta_gates>());
  library.impl("gated_delta_rule", bound<&recurrent::gated_delta_rule>());
  library.impl("mamba2_gates", bound<&recurrent::mamba2_gates>());
  library.impl("mamba2_scan", bound<&recurrent::mamba2_scan>());
  library.impl("mamba2_layer", bound<&recurrent::mamba2_layer>());
  library.impl("real_gated_recurrence", bound<&recurrent::real_gated_recurrence>());
  library.impl("selective_scan", bound<&recurrent::selective_scan>());

  library.impl("argmax", bound<&argmax>());
  library.impl("draw_tokens", bound<&draw_tokens>());
  library.impl("token_weights", bound<&token_weights>());
  library.impl("score_tokens", bound<&score_tokens>());
}
