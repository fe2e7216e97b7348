// Linear layers of integers: rows are rounded to some bits with a scale per group along K, weights are 8-bit integers
// or are expanded to them. A group's dot products are exact, whatever unit computes them, and they are summed in one
// order. So results have the same bits for any number of rows: few rows go through the vector units, for which memory
// is slower; many through AMX tiles (quantized/amx.h).
//
// A weight's panel is two tiles of 16 columns, its groups one after the other along K. The class int4::Weight or
// int8::Weight defines a format: how rows are rounded, the bytes of a group, how its steps are multiplied, and what
// they add to sums.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "base/activations.h"
#include "base/array_ref.h"
#include "base/prefetch.h"
#include "base/rows.h"
#include "base/vec.h"
#include "linear/problem.h"
#include "quantized/quantized_rows.h"

namespace twostep::integers {

constexpr int64_t kPanel = 2 * kLanes;
constexpr int64_t kWordBytes = kLanes * sizeof(uint32_t);  // of a word per column of a tile

inline PartU load_words(const uint8_t* header, int part) {
  PartU words;
  std::memcpy(&words, header + part * sizeof(words), sizeof(words));
  return words;
}

// Returns the upper halves of a word per column: bfloat16 numbers.
inline Vec upper_numbers(const uint8_t* header) {
  return each_part([&](int i) { return (PartF)(load_words(header, i) & 0xffff0000u); });
}

// What is prefetched with every line of a panel that is multiplied. A panel that comes from memory prefetches itself,
// and is read in the order of memory: one row reads a fifth faster so than from both tiles in turn.
struct PrefetchPanel {
  static constexpr bool kFromMemory = true;

  TWOSTEP_INLINE void operator()(const uint8_t* line) const {
#if defined(__AVX2__) && !defined(__AVX512F__)
    prefetch_ahead<1536, 0>(line);  // Zen 3 has 24 line fill buffers, and a second distance takes some
#else
    prefetch_ahead(line);
#endif
  }
};

struct PrefetchNext {
  static constexpr bool kFromMemory = false;
  Prefetcher& ahead;

  TWOSTEP_INLINE void operator()(const uint8_t* /*line*/) const { ahead.fetch(); }
};

#if defined(__AVX512F__)
constexpr bool kHasManyRegisters = true;
#else
constexpr bool kHasManyRegisters = false;
#endif

// Calls f(tiles) for the tiles of a panel that share what is loaded of rows, where tiles(g) calls g with the number of
// each: both, if there are registers for the sums of both.
template <class Prefetch, class F>
TWOSTEP_INLINE inline void for_tiles_at_once(F f) {
  if constexpr (kHasManyRegisters && !Prefetch::kFromMemory) {
    f([](auto each) TWOSTEP_INLINE { unroll<2>(each); });
  } else {
    f([](auto each) TWOSTEP_INLINE { each(std::integral_constant<int, 0>()); });
    f([](auto each) TWOSTEP_INLINE { each(std::integral_constant<int, 1>()); });
  }
}

inline void add_to(Dots& dots, const Bytes& weights, const int8_t* x) { dots = add_products(dots, weights, x); }
template <class AnyDots>
TWOSTEP_INLINE inline void add_to(AnyDots& dots, const Bytes& weights, const int8_t* x) {
  dots.add_products(weights, x);
}

// A step of the rows of one tile, from `row` on.
struct RowsOfStep {
  const int8_t* numbers;
  const int32_t* half_sums;
  int64_t row;
};

// dots += kRows rows times a step whose tiles of bytes begin at `at` and `tile_bytes` after it; calls prefetch(line)
// with each of their lines.
template <class Precision, int kRows, class AnyDots, class Prefetch>
TWOSTEP_INLINE inline void multiply_bytes(const RowsOfStep& rows, const uint8_t* at, int64_t tile_bytes,
                                          AnyDots (&dots)[kRows][2], const Prefetch& prefetch) {
  for_tiles_at_once<Prefetch>([&](auto tiles) TWOSTEP_INLINE {
    for (int64_t k = 0; k < kStep; k += 4) {
      // Others are so far from the first that an instruction tells.
      const int8_t* first_x = Precision::find(rows.numbers, rows.row, k);
      Bytes bytes[2];
      tiles([&](auto tile) TWOSTEP_INLINE {
        const uint8_t* line = at + tile * tile_bytes + k / 4 * kLineBytes;
        prefetch(line);
        bytes[tile] = load_bytes(line);
      });
      unroll<kRows>([&](auto r) TWOSTEP_INLINE {
        const int8_t* x = Precision::find(first_x, r, 0);
        tiles([&](auto tile) TWOSTEP_INLINE { add_to(dots[r][tile], bytes[tile], x); });
      });
    }
  });
}

template <class Weight>
using RowsOf = Rows<typename Weight::Precision>;

// Bytes of a panel's group: a header, then its steps.
template <class Weight>
constexpr int64_t kGroupBytes = Weight::kHeaderBytes + kGroupSteps * Weight::kStepBytes;

template <class Weight>
constexpr int64_t panel_bytes(int64_t k) {
  return divide_up(k, kGroup) * Weight::kHeaderBytes + divide_up(k, kStep) * Weight::kStepBytes;
}

// Finishes the sums of one panel: adds the bias, and rounds, or gates its upper tile with its lower.
template <class Element>
class PanelWriter {
 public:
  PanelWriter(const Problem<Element>& p, int64_t panel)
      : p_(p), first_(panel * kPanel), columns_(std::min(kPanel, p.n - first_)) {
    if (!p.bias) return;
    Element bias[kPanel] = {};
    std::copy_n(p.bias + first_, columns_, bias);
    bias_[0] = load(bias), bias_[1] = load(bias + kLanes);
  }

  // Writes rows [row, row + count). A loop over several rows hides the latency of a gate.
  void write(int64_t row, int64_t count, const Vec (*sums)[2]) const {
    if (p_.activation == Activation::kNone) {
      for (int64_t r = 0; r < count; ++r) write_row(row + r, sums[r][0] + bias_[0], sums[r][1] + bias_[1]);
    } else {
      with_activation(p_.activation, [&]<class Op>() { write_gated<Op>(row, count, sums); });
    }
  }

 private:
  void write_row(int64_t row, Vec low, Vec high) const {
    Element* out = p_.out + row * p_.n + first_;
    store_upto(out, columns_, low);
    if (columns_ > kLanes) store_upto(out + kLanes, columns_ - kLanes, high);
  }

  template <class Op>
  void write_gated(int64_t row, int64_t count, const Vec (*sums)[2]) const {
    Element* out = p_.out + (row * p_.n + first_) / 2;
    for (int64_t r = 0; r < count; ++r, out += p_.n / 2) {
      const Vec gate = rounded_to(sums[r][0] + bias_[0], out), up = rounded_to(sums[r][1] + bias_[1], out);
      store(out, gated<Op>(gate, up, out));
    }
  }

  const Problem<Element>& p_;
  int64_t first_, columns_;
  Vec bias_[2] = {};
};

// Multiplies rows [row, row + kRows) of a tile of rows by one panel. Prefetches what follows in the panel, or else
// takes turns with `ahead`, and returns what is left of that.
template <class Weight, int kRows, bool kPrefetches, class Element>
Prefetcher multiply_panel(const RowsOf<Weight>& rows, int64_t tile, int64_t row, const uint8_t* panel,
                          const PanelWriter<Element>& writer, Prefetcher ahead) {
  const auto prefetch = [&] {
    if constexpr (kPrefetches) {
      return PrefetchPanel();
    } else {
      return PrefetchNext{ahead};
    }
  }();
  Vec sums[kRows][2] = {};
  for (int64_t group = 0; group < rows.groups; ++group, panel += kGroupBytes<Weight>) {
    const int64_t place = rows.place(tile, group) + row;
    typename Weight::Dots dots[kRows][2];
    unroll<kRows>([&](auto r) { dots[r][0] = dots[r][1] = Weight::first_dots(rows.sums[place + r]); });
    for (int64_t step = 0; step < rows.steps_of(group); ++step) {
      const int64_t number = group * kGroupSteps + step;
      const RowsOfStep some{rows.numbers_of(tile, number), rows.half_sums_of(tile, number), row};
      const uint8_t* at = panel + Weight::kHeaderBytes + step * Weight::kStepBytes;
      Weight::template multiply_step<kRows>(some, at, dots, prefetch);
    }
    unroll<2>([&](auto half) TWOSTEP_INLINE {
      const typename Weight::Scales scales(panel, half);
      unroll<kRows>([&](auto r) TWOSTEP_INLINE {
        const Vec dot = to_floats(Weight::total(dots[r][half]));
        sums[r][half] = scales.add(sums[r][half], dot, rows.scales[place + r], rows.sums[place + r]);
      });
    });
  }
  Vec finished[kRows][2];  // so that the sums may stay in registers
  std::memcpy(finished, sums, sizeof(sums));
  writer.write(tile * kTileRows + row, kRows, finished);
  return ahead;
}

template <class Weight, bool kPrefetches, int kRows = Weight::kRowsAtOnce, class Element>
Prefetcher multiply_panel_rows(const RowsOf<Weight>& rows, int64_t tile, int64_t row, int64_t count,
                               const uint8_t* panel, const PanelWriter<Element>& writer, const Prefetcher& ahead) {
  if constexpr (kRows > 0) {
    if (count == kRows) return multiply_panel<Weight, kRows, kPrefetches>(rows, tile, row, panel, writer, ahead);
    return multiply_panel_rows<Weight, kPrefetches, kRows - 1>(rows, tile, row, count, panel, writer, ahead);
  }
  return ahead;
}

constexpr int64_t kRowsPerTask = 8 * kTileRows;

// Rows [first, first + count), where `first` starts a tile.
struct Span {
  int64_t first, count;

  // How often a panel is read for these rows.
  template <class Weight>
  int64_t passes() const {
    const auto passes_of = [](int64_t rows) { return divide_up(rows, Weight::kRowsAtOnce); };
    return count / kTileRows * passes_of(kTileRows) + passes_of(count % kTileRows);
  }
};

template <class Weight, bool kPrefetches, class Element>
void multiply_span(const RowsOf<Weight>& rows, const Span& span, const uint8_t* panel,
                   const PanelWriter<Element>& writer, Prefetcher ahead) {
  for (int64_t first = 0; first < span.count; first += kTileRows) {
    const int64_t end = std::min(kTileRows, span.count - first);
    int64_t parts = divide_up(end, Weight::kRowsAtOnce);
    for (int64_t row = 0, count; row < end; row += count, --parts) {
      count = divide_up(end - row, parts);
      const int64_t tile = (span.first + first) / kTileRows;
      ahead = multiply_panel_rows<Weight, kPrefetches>(rows, tile, row, count, panel, writer, ahead);
    }
  }
}

// Multiplies in the vector units. A task is a panel and some rows, as many at once as there are registers for. A panel
// that is read once prefetches itself. One that is read several times comes from the L2 cache then, and the next one is
// prefetched meanwhile: else few rows would wait for memory, and then memory for them. A panel that would be expanded
// many times is expanded beforehand.
template <class Weight, class Element>
void multiply_vectors(Problems<Element> problems, ArrayRef<RowsOf<Weight>> all_rows) {
  const Tasks<Element> tasks(problems, kPanel, kTileRows, kRowsPerTask);
  const int64_t bytes = panel_bytes<Weight>(problems.front().k), lines = bytes / kLineBytes;
  const auto panel_of = [problems, bytes](const Task& task) {
    return static_cast<const uint8_t*>(problems[task.problem].packed) + task.panel * bytes;
  };
  run_foreseen_tasks(tasks.count(), is_small(problems), [=, &tasks](int64_t i, int64_t then) {
    const Task task = tasks[i];
    const uint8_t *at = panel_of(task), *next = then < tasks.count() ? panel_of(tasks[then]) : at;
    const Span span{task.row, task.row_end - task.row};
    const int64_t passes = span.passes<Weight>();
    const PanelWriter<Element> writer(problems[task.problem], task.panel);
    const RowsOf<Weight>& rows = all_rows[task.problem];
    const auto ahead_for = [&](int64_t turns) {
      return Prefetcher(next, next == at ? 0 : lines, 0, 1, turns * rows.steps);
    };
    if (passes == 1) return multiply_span<Weight, true>(rows, span, at, writer, Prefetcher());
    if constexpr (requires { typename Weight::Expanded; }) {
      using Expanded = typename Weight::Expanded;
      if (passes > Weight::kMaxPasses) {
        const Prefetcher ahead = ahead_for(span.passes<Expanded>() * Expanded::kPrefetches);
        return multiply_span<Expanded, false>(rows, span, Weight::expand(at, rows.steps), writer, ahead);
      }
    }
    multiply_span<Weight, false>(rows, span, at, writer, ahead_for(passes * Weight::kPrefetches));
  });
}

}  // namespace twostep::integers
