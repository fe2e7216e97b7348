// Products of rounded rows with weights that stay in the blocks of a file.

#pragma once

#include <cstdint>

#include "base/scratch.h"
#include "linear/problem.h"
#include "linear/rounded_vector.h"

#if defined(__AMX_INT8__)
#include "linear/rounded_amx.h"
#endif

namespace twostep::rounded {

// Multiplies a task by the instructions that are fastest for its rows.
inline void multiply_task(const PanelTask& task) {
  static thread_local Scratch<float> sums_of_thread;
  static thread_local Scratch<blocks::Group> groups_of_thread;
  float* sums = sums_of_thread.get(kRowsPerTask * blocks::kColumns);
  blocks::Group* groups = groups_of_thread.get(kPieceGroups);
#if defined(__AMX_INT8__)
  if (amx::is_for_tiles(task)) return amx::multiply_task(task, sums, groups);
#endif
  task.compute(sums, groups, [&](const PieceOfK& piece) { vector::multiply_piece(task, piece, sums, groups); });
}

// Multiplies by weights in blocks that were packed for rows of integers.
inline void multiply_all(Problems<float> problems) {
  const Problem<float>&first = problems.front(), &last = problems.back();
  const int64_t k = first.k;
  const RoundedRows rows = round_rows(first.x, (last.x - first.x) / k + last.rows, k);
  const Tasks<float> tasks(problems, blocks::kColumns, RoundedRows::kTileRows, kRowsPerTask);
  const auto panel_of = [problems](const Task& task) {
    return blocks::header_of(problems[task.problem].packed).start_of(task.panel);
  };
  run_foreseen_tasks(tasks.count(), is_small(problems), [=, &tasks, &rows](int64_t i, int64_t then) {
    const Task task = tasks[i];
    const Problem<float>& p = problems[task.problem];
    const uint8_t *at = panel_of(task), *next = then < tasks.count() ? panel_of(tasks[then]) : at;
    multiply_task({p, rows, (p.x - problems.front().x) / k, task, next == at ? nullptr : next});
  });
}

}  // namespace twostep::rounded
