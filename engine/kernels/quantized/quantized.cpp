// The operators of linear layers over quantized weights.

#include <algorithm>

#include "base/tensor.h"
#include "quantized/int4.h"
#include "quantized/int4_levels.h"
#include "quantized/int8.h"
#include "quantized/pack.h"
#include "quantized/quantize.h"
#include "quantized/quantize_lanes.h"

#if defined(__AMX_INT8__)
#include "base/array_ref.h"
#include "base/bfloat16.h"
#include "base/check.h"
#include "quantized/int4_amx.h"
#include "quantized/int8_amx.h"
#endif

namespace twostep {
namespace {

void check_dtype(Dtype dtype, const char* what) {
  TWOSTEP_CHECK(dtype == kFloat || dtype == kBFloat16, what, " float32 or bfloat16, not ", dtype);
}

// Checks codes [N, K], and that `others` have a number for each group of `length` along K.
void check_codes(const Tensor& codes, int64_t length, std::initializer_list<Tensor> others) {
  TWOSTEP_CHECK(codes.dim() == 2 && codes.numel() > 0 && codes.scalar_type() == kByte,
                "codes must be a non-empty matrix of bytes");
  for (const Tensor& each : others) {
    TWOSTEP_CHECK(each.dim() == 2 && each.size(0) == codes.size(0) && each.size(1) == divide_up(codes.size(1), length),
                  "a number per group is missing");
  }
}

#if defined(__AMX_INT8__)
// Problems that have rows enough for tiles have a loop, and those that have not.
template <class Weight, class Element, class AllRows>
void multiply_by_rows(Problems<Element> problems, const AllRows& rows) {
  ProblemList<Element> few, many;
  AllRows rows_of_few, rows_of_many;
  for (size_t i = 0; i < problems.size(); ++i) {
    const bool is_few = problems[i].rows <= Weight::kFewRows;
    (is_few ? few : many).push_back(problems[i]), (is_few ? rows_of_few : rows_of_many).push_back(rows[i]);
  }
  if (!many.empty()) integers::multiply_amx<Weight, Element>(many, rows_of_many);
  if (!few.empty()) integers::multiply_vectors<Weight, Element>(few, rows_of_few);
}
#endif

template <class Weight, class Element>
void multiply(Problems<Element> problems) {
  const auto rows = integers::round_rows<typename Weight::Precision>(problems);
#if defined(__AMX_INT8__)
  if (amx::is_granted()) return multiply_by_rows<Weight, Element>(problems, rows);
#endif
  integers::multiply_vectors<Weight, Element>(problems, rows);
}

// x [T, K] times packed quantized weights, with rows rounded to integers; the arguments are those of `grouped_linear`.
template <class Weight>
Tensor multiply_all(const Tensor& x, Shares shares, int64_t n, Activation activation, const Buffer& out) {
  check_dtype(x.scalar_type(), "linear takes");
  TWOSTEP_CHECK(x.dim() == 2, "linear takes rows [T, K]");
  for (const Share& each : shares) {
    TWOSTEP_CHECK(each.packed->sizes() ==
                          IntArrayRef({divide_up(n, integers::kPanel), integers::panel_bytes<Weight>(x.size(1))}) &&
                      each.packed->is_contiguous() && each.packed->scalar_type() == kByte,
                  "rows and packed weight differ in size or dtype");
  }
  if (activation != Activation::kNone && n % integers::kPanel != 0) {
    return gate(multiply_all<Weight>(x, shares, n, Activation::kNone, {}), activation, out);
  }
  return multiply_rows_of(x, shares, n, activation, out, []<class Element>(Problems<Element> problems) {
    multiply<Weight, Element>(problems);
  });
}

#if defined(__AMX_INT8__)
using Int8Weight = int8::TileWeight;
using Int8WeightForWideRows = int8::TileWeightForWideRows;
using Int4Weight = int4::TileWeight;
#else
using Int8Weight = int8::Weight;
using Int8WeightForWideRows = int8::WeightForWideRows;
using Int4Weight = int4::Weight;
#endif

}  // namespace

std::tuple<Tensor, Tensor, Tensor> quantize(const Tensor& weight, int64_t bits, int64_t num_refits) {
  TWOSTEP_CHECK(weight.dim() == 2 && weight.numel() > 0 && (bits == 8 || bits == 4),
                "what is quantized must be a non-empty matrix, to 8 or 4 bits");
  check_dtype(weight.scalar_type(), "what is quantized must be");
  const Tensor w = weight.contiguous();
  const int64_t n = w.size(0), k = w.size(1);
  const int64_t groups = divide_up(k, bits == 8 ? quantizing::kGroup8 : quantizing::kGroup4);
  Tensor codes = new_empty({n, k}, kByte);
  Tensor scales = new_empty({n, groups}, kBFloat16), minimums = new_empty_like(scales);
  const auto quantize_all = [&](const auto* rows) {
    run_tasks(n, false, [&](int64_t i) {
      auto* to = codes.mutable_data_ptr<uint8_t>() + i * k;
      auto* s = scales.mutable_data_ptr<BFloat16>() + i * groups;
      auto* m = minimums.mutable_data_ptr<BFloat16>() + i * groups;
      bits == 8 ? quantizing::quantize_row<quantizing::kGroup8>(rows + i * k, k, bits, num_refits, to, s, m)
                : quantizing::quantize_row_in_lanes(rows + i * k, k, bits, num_refits, to, s, m);
    });
  };
  w.scalar_type() == kFloat ? quantize_all(w.const_data_ptr<float>()) : quantize_all(w.const_data_ptr<BFloat16>());
  return {codes, scales, minimums};
}

std::tuple<Tensor, Tensor, Tensor> to_levels(const Tensor& weight, const Tensor& scales, const Tensor& minimums) {
  check_dtype(weight.scalar_type(), "what is quantized must be");
  const Tensor w = weight.contiguous(), s = scales.contiguous(), m = minimums.contiguous();
  const int64_t n = w.size(0), k = w.size(1), groups = divide_up(k, levels::kGroup);
  Tensor codes = new_empty({n, k}, kByte), found = new_empty({n, groups}, codes.scalar_type());
  check_codes(codes, levels::kGroup, {s, m});
  Tensor shared = new_empty({n, divide_up(k, levels::kScaleGroup)}, s.scalar_type());
  const auto level_all = [&](const auto* rows) {
    run_tasks(n, false, [&](int64_t i) {
      levels::level_row(rows + i * k, k, s.const_data_ptr<BFloat16>() + i * groups,
                        m.const_data_ptr<BFloat16>() + i * groups, codes.mutable_data_ptr<uint8_t>() + i * k,
                        found.mutable_data_ptr<uint8_t>() + i * groups,
                        shared.mutable_data_ptr<BFloat16>() + i * shared.size(1));
    });
  };
  w.scalar_type() == kFloat ? level_all(w.const_data_ptr<float>()) : level_all(w.const_data_ptr<BFloat16>());
  return {codes, found, shared};
}

Tensor pack_int8(const Tensor& codes, const Tensor& scales, const Tensor& minimums) {
  check_codes(codes, quantizing::kGroup8, {scales, minimums});
  const Tensor c = codes.contiguous(), s = scales.contiguous(), m = minimums.contiguous();
  const int64_t n = c.size(0), k = c.size(1), groups = s.size(1);
  const auto* codes_of = c.const_data_ptr<uint8_t>();
  const auto *scales_of = s.const_data_ptr<BFloat16>(), *minimums_of = m.const_data_ptr<BFloat16>();
  static_assert(quantizing::kGroup8 == integers::kGroup);
  return packing::pack<int8::Weight>(n, k, [&](int64_t i, uint8_t* panel) {
    packing::pack_int8_column({codes_of + i * k, scales_of + i * groups, minimums_of + i * groups, k, groups},
                              i % integers::kPanel, panel);
  });
}

Tensor pack_int4(const Tensor& codes, const Tensor& levels, const Tensor& scales) {
  check_codes(codes, levels::kGroup, {levels});
  check_codes(codes, levels::kScaleGroup, {scales});
  const Tensor c = codes.contiguous(), l = levels.contiguous(), s = scales.contiguous();
  const int64_t n = c.size(0), k = c.size(1), subgroups = l.size(1), groups = s.size(1);
  const auto *codes_of = c.const_data_ptr<uint8_t>(), *levels_of = l.const_data_ptr<uint8_t>();
  const auto* scales_of = s.const_data_ptr<BFloat16>();
  return packing::pack<int4::Weight>(n, k, [&](int64_t i, uint8_t* panel) {
    packing::pack_int4_column({codes_of + i * k, levels_of + i * subgroups, scales_of + i * groups, k, subgroups},
                              i % integers::kPanel, panel);
  });
}

std::tuple<Tensor, bool> quantize_and_pack(const Tensor& weight, int64_t bits, int64_t row_bits, int64_t num_refits) {
  TWOSTEP_CHECK(weight.dim() == 2 && weight.numel() > 0 && (bits == 8 || (bits == 4 && row_bits == 8)),
                "what is quantized must be a non-empty matrix, to 8 or 4 bits");
  check_dtype(weight.scalar_type(), "what is quantized must be");
  const Tensor w = weight.contiguous();
  const auto quantize_rows = [&](const auto* rows) {
    return packing::quantize_and_pack(rows, w.size(0), w.size(1), {bits, num_refits, row_bits == 8});
  };
  return w.scalar_type() == kFloat ? quantize_rows(w.const_data_ptr<float>())
                                   : quantize_rows(w.const_data_ptr<BFloat16>());
}

Tensor inverse_hadamard(const Tensor& weight) {
  TWOSTEP_CHECK(weight.dim() == 2, "what is transformed must be a matrix");
  check_dtype(weight.scalar_type(), "what is transformed must be");
  const int64_t n = weight.size(0), k = weight.size(1);
  Tensor all = new_empty({n, round_up(k, hadamard::kSmallestBlock)}, kFloat).zero_();
  all.narrow(1, 0, k).copy_(weight);
  auto* numbers = all.mutable_data_ptr<float>();
  run_tasks(n, false, [&](int64_t i) { hadamard::invert(numbers + i * all.size(1), all.size(1)); });
  return all;
}

Tensor linear_int8_wide_rows(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t n) {
  return multiply_all<Int8WeightForWideRows>(x, share_of(x, packed, bias), n, Activation::kNone, {});
}

Tensor grouped_linear_int8(const Tensor& x, Shares shares, int64_t n, Activation activation, const Buffer& out) {
  return multiply_all<Int8Weight>(x, shares, n, activation, out);
}

Tensor grouped_linear_int4(const Tensor& x, Shares shares, int64_t n, Activation activation, const Buffer& out) {
  return multiply_all<Int4Weight>(x, shares, n, activation, out);
}

Tensor linear_int8(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t n,
                   Activation activation, const Buffer& out) {
  return grouped_linear_int8(x, share_of(x, packed, bias), n, activation, out);
}

Tensor linear_int4(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t n,
                   Activation activation, const Buffer& out) {
  return grouped_linear_int4(x, share_of(x, packed, bias), n, activation, out);
}

}  // namespace twostep
