// The operators of linear layers over quantized weights.

#include <torch/library.h>

#include "linear_kernels.h"
#include "huge_pages.h"
#include "linear_quantized.h"
#include "quantize.h"

namespace twostep {
namespace {

// weight [N, K] -> codes [N, K] uint8, scales and minimums [N, ceil(K / 32)] bfloat16.
std::tuple<at::Tensor, at::Tensor, at::Tensor> quantize(const at::Tensor& weight, int64_t bits, int64_t num_refits) {
  TORCH_CHECK(weight.dim() == 2 && weight.numel() > 0 && (bits == 8 || bits == 4),
              "what is quantized must be a non-empty matrix, to 8 or 4 bits");
  const at::Tensor w = weight.contiguous();
  const int64_t n = w.size(0), k = w.size(1), groups = divide_up(k, kQuantGroup);
  at::Tensor codes = at::empty({n, k}, w.options().dtype(at::kByte));
  at::Tensor scales = at::empty({n, groups}, w.options().dtype(at::kBFloat16)), minimums = at::empty_like(scales);
  const auto quantize_all = [&](const auto* rows) {
    run_tasks(n, false, [&](int64_t i) {
      quantizing::quantize_row(rows + i * k, k, bits, num_refits, codes.mutable_data_ptr<uint8_t>() + i * k,
                               scales.mutable_data_ptr<at::BFloat16>() + i * groups,
                               minimums.mutable_data_ptr<at::BFloat16>() + i * groups);
    });
  };
  const at::ScalarType dtype = w.scalar_type();
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kBFloat16, "float32 or bfloat16 are quantized, not ", dtype);
  dtype == at::kFloat ? quantize_all(w.const_data_ptr<float>()) : quantize_all(w.const_data_ptr<at::BFloat16>());
  return {codes, scales, minimums};
}

// How a kernel wants the words: in panels of that many columns, and with `is_by_step` those of all columns at one place
// of K together, else those of the same columns.
struct Layout {
  int64_t panel;
  bool is_by_step;
};

bool uses_amx(at::ScalarType dtype) {
#if defined(__AMX_BF16__)
  return dtype == at::kBFloat16 && amx::is_granted();
#else
  static_cast<void>(dtype);
  return false;
#endif
}

Layout layout_for(at::ScalarType dtype) {
  if (uses_amx(dtype)) return {2 * vector::kLanes, false};
  return {vector::kPanel, true};
}

struct Quantized {
  const uint8_t* codes;                   // [n, k]
  const at::BFloat16 *scales, *minimums;  // [n, groups]
  int64_t n, k, groups, bits;
};

void pack_group(const Quantized& q, const Layout& layout, int64_t panel, int64_t group, uint32_t* to) {
  const int64_t first = panel * layout.panel, columns = std::min(layout.panel, q.n - first);
  for (int64_t column = 0; column < columns; ++column) {
    const int64_t from = (first + column) * q.groups + group;
    to[column] = uint32_t{q.scales[from].x} << 16 | q.minimums[from].x;
  }
  to += layout.panel;
  const int64_t vectors = layout.panel / vector::kLanes, length = 32 / q.bits, words = kQuantGroup / length;
  for (int64_t i = 0; i < vectors * words; ++i, to += vector::kLanes) {
    const int64_t column = (layout.is_by_step ? i % vectors : i / words) * vector::kLanes;
    const int64_t k = group * kQuantGroup + (layout.is_by_step ? i / vectors : i % words) * length;
    for (int64_t lane = 0; lane < std::min<int64_t>(vector::kLanes, columns - column); ++lane) {
      const uint8_t* codes = q.codes + (first + column + lane) * q.k + k;
      for (int64_t j = 0; j < std::min(length, q.k - k); ++j) to[lane] |= uint32_t{codes[j]} << (8 + j * q.bits) % 32;
    }
  }
}

// codes [N, K] uint8, scales and minimums [N, ceil(K / 32)] bfloat16 -> [panels, groups, words] int32, opaque, for rows of
// that dtype.
at::Tensor pack_quantized(const at::Tensor& codes, const at::Tensor& scales, const at::Tensor& minimums, int64_t bits,
                          at::ScalarType dtype) {
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kBFloat16, "linear takes float32 or bfloat16, not ", dtype);
  TORCH_CHECK(codes.dim() == 2 && codes.numel() > 0 && (bits == 8 || bits == 4),
              "codes must be a non-empty matrix of 8 or 4 bits");
  const int64_t n = codes.size(0), k = codes.size(1), groups = divide_up(k, kQuantGroup);
  for (const at::Tensor& each : {scales, minimums}) {
    TORCH_CHECK(each.dim() == 2 && each.size(0) == n && each.size(1) == groups, "a group has one scale, one minimum");
  }
  const at::Tensor c = codes.contiguous(), s = scales.contiguous(), m = minimums.contiguous();
  const Quantized q{c.const_data_ptr<uint8_t>(), s.const_data_ptr<at::BFloat16>(), m.const_data_ptr<at::BFloat16>(),
                    n, k, groups, bits};
  const Layout layout = layout_for(dtype);
  const int64_t panels = divide_up(n, layout.panel), words = group_bytes(layout.panel, bits) / sizeof(uint32_t);
  at::Tensor packed = zeros_in_huge_pages({panels, groups, words}, codes.options().dtype(at::kInt));
  auto* to = reinterpret_cast<uint32_t*>(packed.mutable_data_ptr<int32_t>());
  run_tasks(panels, false, [&](int64_t panel) {
    for (int64_t group = 0; group < groups; ++group) {
      pack_group(q, layout, panel, group, to + (panel * groups + group) * words);
    }
  });
  return packed;
}

template <int kBits>
void multiply_any(const Problem<float>& p, const uint8_t* packed) {
  vector::multiply<vector::Float32>(p, vector::QuantizedWeight<vector::Float32, kBits>{packed});
}

template <int kBits>
void multiply_any(const Problem<at::BFloat16>& p, const uint8_t* packed) {
#if defined(__AMX_BF16__)
  if (amx::is_granted()) {
    return amx::multiply(p, amx::QuantizedWeight<kBits>{packed, divide_up(p.k, amx::kStep)});
  }
#endif
  vector::multiply<vector::BFloat16>(p, vector::QuantizedWeight<vector::BFloat16, kBits>{packed});
}

}  // namespace

// As `linear`, over what pack_quantized made with as many bits for x's dtype.
at::Tensor linear_quantized(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                            int64_t n, int64_t bits, Activation activation) {
  const at::ScalarType dtype = x.scalar_type();
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kBFloat16, "linear takes float32 or bfloat16, not ", dtype);
  TORCH_CHECK(x.dim() == 2 && packed.dim() == 3 && (bits == 8 || bits == 4),
              "linear takes rows [T, K] and a packed weight");
  const Layout layout = layout_for(dtype);
  const int64_t words = group_bytes(layout.panel, bits) / sizeof(int32_t);
  TORCH_CHECK(packed.size(0) == divide_up(n, layout.panel) && packed.size(1) == divide_up(x.size(1), kQuantGroup) &&
                  packed.size(2) == words,
              "rows and packed weight differ in size or dtype");
  if (activation != Activation::kNone && !gates_itself(x.scalar_type(), n)) {
    return gate(linear_quantized(x, packed, bias, n, bits), activation);
  }
  return multiply_rows_of(x, bias, n, activation, [&](const auto& problem) {
    const auto* data = reinterpret_cast<const uint8_t*>(packed.const_data_ptr<int32_t>());
    bits == 8 ? multiply_any<8>(problem, data) : multiply_any<4>(problem, data);
  });
}

}  // namespace twostep

TORCH_LIBRARY_FRAGMENT(twostep, m) {
  m.def("quantize(Tensor weight, int bits, int num_refits) -> (Tensor, Tensor, Tensor)");
  m.def("pack_quantized(Tensor codes, Tensor scales, Tensor minimums, int bits, ScalarType dtype) -> Tensor");
  m.def("linear_quantized(Tensor x, Tensor packed, Tensor? bias, int out_features, int bits) -> Tensor");
}

TORCH_LIBRARY_IMPL(twostep, CPU, m) {
  m.impl("quantize", twostep::quantize);
  m.impl("pack_quantized", twostep::pack_quantized);
  m.impl("linear_quantized", [](const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                                 int64_t n, int64_t bits) {
    return twostep::linear_quantized(x, packed, bias, n, bits);
  });
}
