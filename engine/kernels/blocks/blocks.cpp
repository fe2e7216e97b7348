// The operators of weights that stay in the blocks of a file, but for their product, which is that of `linear`.

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/array_ref.h"
#include "base/check.h"
#include "base/huge_pages.h"
#include "base/operators.h"
#include "base/tensor.h"
#include "base/thread_pool.h"
#include "blocks/expand.h"
#include "blocks/layout.h"

namespace twostep {
namespace {

using namespace blocks;

struct StoredRow {
  const uint8_t* at;
  int64_t kind;
};

// Writes the plane of some bits of all codes of a group.
template <int64_t kCodes, int kBits, int kShift>
void write_plane(const uint8_t* __restrict codes, uint8_t* __restrict plane) {
  constexpr int64_t kBytes = kCodes * kBits / 8;
  for (int shift = 0; shift < 8; shift += kBits, codes += kBytes) {
    for (int64_t i = 0; i < kBytes; ++i) plane[i] |= (codes[i] >> kShift & ((1 << kBits) - 1)) << shift;
  }
}

// A block of each column of a panel: first the halves and levels are written, then all columns' codes.
template <class Kind>
class BlockWriter {
  using Size = Sizes<Kind>;

 public:
  BlockWriter(uint8_t* to, bool is_for_integers) : to_(to), is_for_integers_(is_for_integers) {}

  void add(const Block& block, int64_t column) {
    for (int i = 0; i < Kind::kHalves; ++i) std::memcpy(to_ + 2 * (i * kColumns + column), &block.halves[i], 2);
    for (int g = 0; g < Kind::kGroups; ++g) {
      for (int i = 0; i < Kind::kLevels; ++i) levels_of(g)[i * kColumns + column] = block.levels[i][g];
    }
    for (int i = 0; i < Kind::kNumbers; ++i) {
      uint8_t* codes = codes_ + i / Kind::kGroup * Size::kCodes;
      codes[place_of(i % Kind::kGroup, column, is_for_integers_)] = block.codes[i];
    }
  }

  void write_codes() const {
    for (int g = 0; g < Kind::kGroups; ++g) {
      const uint8_t* codes = codes_ + g * Size::kCodes;
      uint8_t* low = levels_of(g) + Size::kLevels;
      write_plane<Size::kCodes, Kind::kLowBits, 0>(codes, low);
      if constexpr (Kind::kHighBits > 0) {
        write_plane<Size::kCodes, Kind::kHighBits, Kind::kLowBits>(codes, low + Size::kLow);
      }
    }
  }

 private:
  uint8_t* levels_of(int group) const { return to_ + Size::kHalves + group * Size::kGroup; }

  uint8_t* const to_;
  const bool is_for_integers_;
  uint8_t codes_[Kind::kNumbers * kColumns] = {};
};

template <class Kind>
void pack_panel(const StoredRow* rows, int64_t num_rows, int64_t num_blocks, bool is_for_integers, uint8_t* panel) {
  using Size = Sizes<Kind>;
  for (int64_t column = 0; column < num_rows; ++column) {
    std::memcpy(panel + column * Size::kRowFactors, rows[column].at, Size::kRowFactors);
  }
  for (int64_t i = 0; i < num_blocks; ++i) {
    BlockWriter<Kind> writer(panel + Size::kFactors + i * Size::kBlock, is_for_integers);
    for (int64_t column = 0; column < num_rows; ++column) {
      Block block;
      Kind::read(rows[column].at + Size::kRowFactors + i * Kind::kBytes, block);
      writer.add(block, column);
    }
    writer.write_codes();
  }
}

// Returns K of rows of that many bytes; 0 if they are not whole blocks of a known kind.
int64_t numbers_of(int64_t kind, int64_t row_bytes) {
  int64_t numbers = 0;
  with_kind(kind, [&]<class Kind>() {
    const int64_t bytes = row_bytes - Sizes<Kind>::kRowFactors;
    if (bytes >= 0 && bytes % Kind::kBytes == 0) numbers = bytes / Kind::kBytes * Kind::kNumbers;
  });
  return numbers;
}

std::vector<StoredRow> rows_of(const std::vector<Tensor>& pieces, IntArrayRef kinds, int64_t k) {
  std::vector<StoredRow> rows;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Tensor& piece = pieces[i];
    TWOSTEP_CHECK(piece.dim() == 2 && piece.scalar_type() == kByte && piece.stride(1) == 1,
                  "stored rows are matrices of bytes");
    TWOSTEP_CHECK(numbers_of(kinds[i], piece.size(1)) == k && k > 0, "stored rows have no whole blocks, or differ");
    for (int64_t row = 0; row < piece.size(0); ++row) {
      rows.push_back({piece.const_data_ptr<uint8_t>() + row * piece.stride(0), kinds[i]});
    }
  }
  return rows;
}

// Writes the numbers [count, K] of some columns of a panel.
void expand_columns(const Reader& reader, const uint8_t* panel, bool is_for_integers, int64_t first, int64_t count,
                    int64_t k, float* to) {
  static thread_local Group group;
  group.factors = panel;
  const uint8_t* block = panel + reader.factor_bytes;
  for (int64_t start = 0; start < k; block += reader.block_bytes) {
    for (int64_t g = 0; g < reader.groups; ++g, start += reader.group) {
      reader.expand(block, g, group);
      for (int64_t column = first; column < first + count; ++column) {
        float* row = to + (column - first) * k + start;
        for (int64_t i = 0; i < reader.group; ++i) {
          const auto code = int8_t(group.codes[place_of(i, column, is_for_integers)]);
          row[i] = float(code) * group.scales[column] + group.offsets[column];
        }
      }
    }
  }
}

// Writes the numbers [K] of a row of the weight, which is a column of its panel.
void expand_row(const Header& header, int64_t row, float* to) {
  const int64_t panel = row / kColumns;
  const Reader reader = reader_of(header.panels[panel].kind);
  expand_columns(reader, header.start_of(panel), header.is_for_integers, row % kColumns, 1, header.k, to);
}

}  // namespace

std::optional<Tensor> pack_blocks(const std::vector<Tensor>& pieces, IntArrayRef kinds, bool for_integers) {
  TWOSTEP_CHECK(!pieces.empty() && pieces.size() == kinds.size(), "each piece has a kind");
  const int64_t k = numbers_of(kinds[0], pieces[0].size(-1));
  const std::vector<StoredRow> rows = rows_of(pieces, kinds, k);
  const int64_t n = rows.size(), num_panels = divide_up(n, kColumns);
  std::vector<Panel> panels;
  int64_t size = round_up(sizeof(Header) + num_panels * sizeof(Panel), kLineBytes);
  for (int64_t first = 0; first < n; first += kColumns) {
    const int64_t kind = rows[first].kind, end = std::min(first + kColumns, n);
    if (std::any_of(&rows[first], &rows[0] + end, [&](const auto& row) { return row.kind != kind; })) return {};
    panels.push_back({kind, size});
    with_kind(kind, [&]<class Kind>() {
      size += round_up(Sizes<Kind>::kFactors + k / Kind::kNumbers * Sizes<Kind>::kBlock, kLineBytes);
    });
  }
  Tensor packed = zeros_in_huge_pages({size}, pieces[0].scalar_type());
  uint8_t* to = packed.mutable_data_ptr<uint8_t>();
  auto& header = *reinterpret_cast<Header*>(to);
  header.size = size, header.n = n, header.k = k, header.columns = kColumns, header.is_for_integers = for_integers;
  std::copy(panels.begin(), panels.end(), header.panels);
  run_tasks(num_panels, false, [&](int64_t i) {
    const int64_t first = i * kColumns;
    with_kind(panels[i].kind, [&]<class Kind>() {
      const int64_t count = std::min<int64_t>(kColumns, n - first);
      pack_panel<Kind>(&rows[first], count, k / Kind::kNumbers, for_integers, to + panels[i].offset);
    });
  });
  return packed;
}

Tensor expand_blocks(const Tensor& stored, int64_t kind) {
  const int64_t k = numbers_of(kind, stored.size(-1));
  const std::vector<StoredRow> rows = rows_of({stored}, {kind}, k);
  const int64_t n = rows.size();
  Tensor out = new_empty({n, k}, kFloat);
  auto* to = out.mutable_data_ptr<float>();
  with_kind(kind, [&]<class Kind>() {
    const int64_t num_blocks = k / Kind::kNumbers;
    run_tasks(divide_up(n, kColumns), false, [&](int64_t i) {
      const int64_t first = i * kColumns, count = std::min<int64_t>(kColumns, n - first);
      std::vector<uint8_t> panel(Sizes<Kind>::kFactors + num_blocks * Sizes<Kind>::kBlock);
      pack_panel<Kind>(&rows[first], count, num_blocks, false, panel.data());
      expand_columns(Reader::of<Kind>(), panel.data(), false, 0, count, k, to + first * k);
    });
  });
  return out;
}

Tensor take_block_rows(const Tensor& packed, const Tensor& numbers) {
  const Header& header = header_of(packed.const_data_ptr());
  TWOSTEP_CHECK(is_packed(packed, header.n, header.k), "the weight is not packed in blocks");
  const Tensor which = numbers.contiguous();
  const auto* number = which.const_data_ptr<int64_t>();
  TWOSTEP_CHECK(std::all_of(number, number + which.numel(), [&](int64_t i) { return 0 <= i && i < header.n; }),
                "a row's number is out of range");
  Tensor out = new_empty({which.numel(), header.k}, kFloat);
  auto* to = out.mutable_data_ptr<float>();
  run_tasks(which.numel(), which.numel() == 1,
            [&](int64_t i) { expand_row(header, number[i], to + i * header.k); });
  return out;
}

}  // namespace twostep
