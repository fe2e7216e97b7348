// Linear layers over prepacked weights whose every output is a sum in one fixed order, so that a row's result does
// not depend on how many rows there are, where it stands among them, or how many threads run.
//
// A thread takes a panel of columns and a block of rows. One micro-kernel, a template over the number of rows in
// registers, walks the panel along K with explicit fused multiply-adds: rows of a full tile and rows of a tail run the
// same instructions. Where there are several tiles of rows, they meet the panel in pieces of K that stay in a core's
// caches; a sum waits between two pieces as the float32 it is. The compiler's target selects the vector width and, for
// bfloat16, the dot-product instruction; everything else is shared.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/bfloat16.h"
#include "base/prefetch.h"
#include "linear/formats_vector.h"
#include "linear/panels_blocks.h"
#include "linear/panels_vector.h"
#include "linear/problem.h"
#include "linear/sums_writer.h"

namespace twostep::vector {

template <class Format>
constexpr int64_t kRowsPerTask = 32 * Format::kTileRows;

// sums += kRows rows of x, `stride` apart, times the next k of a panel. Prefetches a turn with each step, and returns
// the prefetcher with the turns that are left.
template <class Format, int kRows, class Steps>
Prefetcher multiply_tile(const typename Format::Element* x, int64_t stride, int64_t k, Steps steps, bool is_first,
                         float* sums, Prefetcher ahead) {
  constexpr int kVectors = Format::kVectors, kPanel = Format::kPanel;
  Vec tile[kRows][kVectors];
  const auto for_each_sum = [&](auto f) TWOSTEP_INLINE {
    unroll<kRows>([&](auto r) TWOSTEP_INLINE {
      unroll<kVectors>([&](auto v) TWOSTEP_INLINE { f(tile[r][v], r * kPanel + v * kLanes); });
    });
  };
  for_each_sum([&](Vec& sum, int at) TWOSTEP_INLINE { sum = is_first ? Vec{} : Float32::load(sums + at); });
  const auto add = [&](auto part, const auto& step, const auto& broadcast) TWOSTEP_INLINE {
    typename Format::Weights weights[kVectors];
    unroll<kVectors>([&](auto v) TWOSTEP_INLINE { weights[v] = Format::template weights<part(), v()>(step); });
    unroll<kRows>([&](auto r) TWOSTEP_INLINE {
      const auto value = broadcast(x + r * stride);
      unroll<kVectors>([&](auto v) TWOSTEP_INLINE {
        tile[r][v] = Format::multiply_add(tile[r][v], weights[v], value);
      });
    });
  };
  for (; k >= kStep; k -= kStep, x += kStep) {
    const auto step = steps.next();
    ahead.fetch();
    unroll<kStep / Format::kAtOnce>([&](auto part) TWOSTEP_INLINE {
      add(part, step, Format::template broadcast<part()>);
    });
  }
  if (k > 0) add(std::integral_constant<int, 0>(), steps.next(), Format::broadcast_last);
  for_each_sum([&](const Vec& sum, int at) TWOSTEP_INLINE { std::memcpy(sums + at, &sum, sizeof(sum)); });
  return ahead;
}

// Multiplies one task, in one piece where one tile holds all rows. Meanwhile the next panel is prefetched.
template <class Panels, class Element>
class PanelProduct {
  using Format = typename Panels::Format;
  using Factor = typename Format::Element;
  static constexpr int kTileRows = Format::kTileRows, kPanel = Format::kPanel;

 public:
  // x [rows, k] of the problem, sums [kRowsPerTask, kPanel]; `next` is another panel that is read then, or null.
  PanelProduct(const Problem<Element>& p, const Factor* x, const Panels& panels, const Task& task, const void* next,
               float* sums)
      : p_(p), x_(x), panels_(panels), task_(task), next_(next), sums_(sums), writer_(p, task.panel),
        all_steps_(divide_up(p.k, kStep)),
        passes_(divide_up(task.row_end - task.row + kTileRows - Panels::kFirstRows, kTileRows)),
        max_steps_(passes_ == 1 ? all_steps_ : steps_of_piece()) {}

  void compute() {
    for (int64_t step = 0; step < all_steps_; step += max_steps_) {
      const Piece piece{task_.panel, step, std::min(max_steps_, all_steps_ - step)};
      ahead_ = passes_ == 1 ? Prefetcher() : ahead_of(piece);
      // Tiles of nearly equal height: 8 rows run as 4 + 4, not as 6 + 2.
      for (int64_t pass = 0, row = task_.row; pass < passes_; ++pass) {
        const int64_t limit = pass == 0 ? Panels::kFirstRows : kTileRows;
        const int64_t rows = std::min(divide_up(task_.row_end - row, passes_ - pass), limit);
        multiply_rows(pass, row, rows, piece);
        row += rows;
      }
    }
  }

 private:
  template <int kRows = kTileRows>
  void multiply_rows(int64_t pass, int64_t row, int64_t rows, const Piece& piece) {
    if constexpr (kRows > 0) {
      if (rows == kRows) return multiply<kRows>(pass, row, piece);
      multiply_rows<kRows - 1>(pass, row, rows, piece);
    }
  }

  template <int kRows>
  void multiply(int64_t pass, int64_t row, const Piece& piece) {
    const int64_t start = piece.step * kStep, k = std::min(piece.steps * kStep, p_.k - start);
    float* sums = sums_ + (row - task_.row) * kPanel;
    const auto multiply_by = [&](const auto& steps) {
      const Factor* x = x_ + row * p_.k + start;
      ahead_ = multiply_tile<Format, kRows>(x, p_.k, k, steps, start == 0, sums, ahead_);
    };
    if (passes_ == 1) {
      multiply_by(panels_.only_pass(piece));
    } else if (pass == 0) {
      multiply_by(panels_.first_pass(piece));
    } else {
      multiply_by(panels_.later_pass(piece));
    }
    if (start + k < p_.k) return;
    for (int64_t r = 0; r < kRows; ++r) writer_.write(row + r, sums + r * kPanel);
  }

  // About equally many, at most kPieceSteps.
  int64_t steps_of_piece() const {
    return round_up(divide_up(all_steps_, divide_up(all_steps_, Panels::kPieceSteps)), Panels::kWholeSteps);
  }

  // What to prefetch in all passes over a piece: the piece that is multiplied after them.
  Prefetcher ahead_of(const Piece& now) const {
    const int64_t end = now.step + now.steps;
    const Piece rest{now.panel, end, std::min(max_steps_, all_steps_ - end)}, first{now.panel, 0, max_steps_};
    const void* then = end < all_steps_ ? panels_.start_of(rest) : next_;
    const int64_t bytes = then ? panels_.bytes_of(end < all_steps_ ? rest : first) : 0;
    return Prefetcher(then, divide_up(bytes, kLineBytes), 0, 1, now.steps * passes_);
  }

  const Problem<Element>& p_;
  const Factor* const x_;
  const Panels& panels_;
  const Task& task_;
  const void* const next_;
  float* const sums_;
  const SumsWriter<Element, kPanel> writer_;
  const int64_t all_steps_, passes_, max_steps_;
  Prefetcher ahead_;
};

// Returns the rows of all problems as numbers to multiply, in memory that the calling thread keeps for its next call.
template <class Factor, class Element>
const Factor* rows_as(Problems<Element> problems) {
  const Element* x = problems.front().x;
  if constexpr (std::is_same_v<Factor, Element>) return x;
  else {
    static thread_local Scratch<Factor> scratch;
    const int64_t count = problems.back().x - x + problems.back().rows * problems.back().k;
    Factor* numbers = scratch.get(count);
    constexpr int64_t kGrain = 1 << 15;
    run_ranges(count, kGrain, [&](int64_t begin, int64_t end) {
      for_each_vector(end - begin, [&](int64_t i, int64_t count) TWOSTEP_INLINE {
        store_upto(numbers + begin + i, count, load_upto(x + begin + i, count));
      });
    });
    return numbers;
  }
}

// Multiplies by the panels that panels_of(problem) returns on each thread.
template <class Element, class PanelsOf>
void multiply_panels(Problems<Element> problems, const PanelsOf& panels_of) {
  using Panels = decltype(panels_of(problems.front()));
  using Format = typename Panels::Format;
  const auto* x = rows_as<typename Format::Element>(problems);
  const Tasks<Element> tasks(problems, Format::kPanel, Format::kTileRows, kRowsPerTask<Format>);
  run_foreseen_tasks(tasks.count(), is_small(problems), [problems, x, &tasks, &panels_of](int64_t i, int64_t then) {
    static thread_local Scratch<float> scratch;
    const Task task = tasks[i], next = then < tasks.count() ? tasks[then] : task;
    const Problem<Element>& p = problems[task.problem];
    const Panels panels = panels_of(p);
    const void* next_panel = nullptr;
    if (next.problem != task.problem) next_panel = panels_of(problems[next.problem]).start_of({next.panel});
    else if (next.panel != task.panel) next_panel = panels.start_of({next.panel});
    float* sums = scratch.get(kRowsPerTask<Format> * Format::kPanel);
    PanelProduct(p, x + (p.x - problems.front().x), panels, task, next_panel, sums).compute();
  });
}

// Multiplies by panels as they are, or widened.
template <class Element, class PanelsOf>
void multiply_by(Problems<Element> problems, const PanelsOf& panels_of) {
  if constexpr (kWidens && std::is_same_v<Element, twostep::BFloat16>) {
    using Panels = WidenedPanels<decltype(panels_of(problems.front()))>;
    multiply_panels(problems, [&](const auto& p) {
      static thread_local Scratch<float> scratch;
      return Panels{panels_of(p), scratch.get(Panels::kPieceElements)};
    });
  } else {
    multiply_panels(problems, panels_of);
  }
}

// Multiplies by weights that stay in blocks.
inline void multiply_blocks(Problems<float> problems) {
  multiply_panels(problems, [](const auto& p) {
    static thread_local Scratch<float> scratch;
    static thread_local blocks::Group group;
    return BlockPanels{blocks::header_of(p.packed), group, scratch.get(BlockPanels::kPieceElements)};
  });
}

// Multiplies by weights that `pack` made.
template <class Format>
void multiply_format(Problems<typename Format::Element> problems) {
  multiply_by(problems, [](const auto& p) {
    return PlainPanels<Format>{static_cast<const typename Format::Element*>(p.packed), divide_up(p.k, kStep)};
  });
}

// Multiplies by weights that `pack` made in one format or the other, by how many columns they have.
template <class Format, class Narrow>
void multiply(Problems<typename Format::Element> problems) {
  is_narrow(problems.front().n) ? multiply_format<Narrow>(problems) : multiply_format<Format>(problems);
}

#if defined(__AVX2__)
// Multiplies by weights that `pack_coded` made.
inline void multiply_coded(Problems<twostep::BFloat16> problems) {
  multiply_by(problems, [](const auto& p) {
    const auto* bytes = static_cast<const uint8_t*>(p.packed);
    return CodedPanels{high_bytes::Panels(bytes, p.panel_bytes, divide_up(p.k, kStep))};
  });
}
#endif

}  // namespace twostep::vector
