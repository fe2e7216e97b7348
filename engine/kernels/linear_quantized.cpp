// The operators of linear layers over quantized weights.

#include <torch/library.h>

#include "linear_quantized.h"
#include "operators.h"

namespace twostep {
namespace {

// How a kernel wants the codes: `panel` columns, in units of `lanes` columns times `pack` values along K. With
// `is_by_step`, the units of all columns at one place of K follow each other, else those of the same columns.
struct Layout {
  int64_t panel, lanes, pack;
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
  constexpr int64_t kLanes = vector::kLanes, kPanel = vector::kPanel;
  if (uses_amx(dtype)) return {2 * kLanes, kLanes, vector::BFloat16::kPack, false};
  return {kPanel, kLanes, dtype == at::kFloat ? vector::Float32::kPack : vector::BFloat16::kPack, true};
}

struct Quantized {
  const uint8_t* codes;                   // [n, k]
  const at::BFloat16 *scales, *minimums;  // [n, groups]
  int64_t n, k, groups, bits;
};

void pack_group(const Quantized& q, const Layout& layout, int64_t panel, int64_t group, uint8_t* to) {
  const int64_t first = panel * layout.panel, columns = std::min(layout.panel, q.n - first);
  auto* header = reinterpret_cast<at::BFloat16*>(to);
  for (int64_t column = 0; column < columns; ++column) {
    header[column] = q.scales[(first + column) * q.groups + group];
    header[layout.panel + column] = q.minimums[(first + column) * q.groups + group];
  }
  to += 2 * layout.panel * sizeof(at::BFloat16);
  const int64_t vectors = layout.panel / layout.lanes, steps = kQuantGroup / layout.pack;
  const int64_t unit_codes = layout.lanes * layout.pack, unit_bytes = unit_codes * q.bits / 8;
  for (int64_t unit = 0; unit < vectors * steps; ++unit, to += unit_bytes) {
    const int64_t vector = layout.is_by_step ? unit % vectors : unit / steps;
    const int64_t step = layout.is_by_step ? unit / vectors : unit % steps;
    for (int64_t i = 0; i < unit_codes; ++i) {
      const int64_t column = vector * layout.lanes + i / layout.pack;
      const int64_t k = group * kQuantGroup + step * layout.pack + i % layout.pack;
      if (column >= columns || k >= q.k) continue;
      to[i % unit_bytes] |= q.codes[(first + column) * q.k + k] << (i < unit_bytes ? 0 : q.bits);
    }
  }
}

// codes [N, K] uint8, scales and minimums [N, ceil(K / 32)] bfloat16 -> [panels, groups, pack, bytes], opaque, for rows
// of that dtype.
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
  const int64_t panels = divide_up(n, layout.panel), bytes = group_bytes(layout.panel, bits);
  at::Tensor packed = at::zeros({panels, groups, layout.pack, bytes / layout.pack}, codes.options());
  uint8_t* to = packed.mutable_data_ptr<uint8_t>();
  run_tasks(panels, false, [&](int64_t panel) {
    for (int64_t group = 0; group < groups; ++group) {
      pack_group(q, layout, panel, group, to + (panel * groups + group) * bytes);
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
                            int64_t n, int64_t bits) {
  const at::ScalarType dtype = x.scalar_type();
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kBFloat16, "linear takes float32 or bfloat16, not ", dtype);
  TORCH_CHECK(x.dim() == 2 && packed.dim() == 4 && (bits == 8 || bits == 4),
              "linear takes rows [T, K] and a packed weight");
  const Layout layout = layout_for(dtype);
  TORCH_CHECK(packed.size(0) == divide_up(n, layout.panel) && packed.size(1) == divide_up(x.size(1), kQuantGroup) &&
                  packed.size(2) == layout.pack && packed.size(2) * packed.size(3) == group_bytes(layout.panel, bits),
              "rows and packed weight differ in size or dtype");
  return multiply_rows_of(x, bias, n, [&](const auto& problem) {
    const uint8_t* data = packed.const_data_ptr<uint8_t>();
    bits == 8 ? multiply_any<8>(problem, data) : multiply_any<4>(problem, data);
  });
}

}  // namespace twostep

TORCH_LIBRARY_FRAGMENT(twostep, m) {
  m.def("pack_quantized(Tensor codes, Tensor scales, Tensor minimums, int bits, ScalarType dtype) -> Tensor");
  m.def("linear_quantized(Tensor x, Tensor packed, Tensor? bias, int out_features, int bits) -> Tensor");
}

TORCH_LIBRARY_IMPL(twostep, CPU, m) {
  m.impl("pack_quantized", twostep::pack_quantized);
  m.impl("linear_quantized", twostep::linear_quantized);
}
