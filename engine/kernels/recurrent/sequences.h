// Where the sequences of a step lie, and the slots of their states, as in engine/mixers/metadata.py.

#pragma once

#include <algorithm>
#include <cstdint>

#include "base/check.h"
#include "base/tensor.h"

namespace twostep::recurrent {

// Sequence i has the tokens [starts[i], starts[i + 1]), and its states are in slot slots[i].
struct Sequences {
  const int64_t *slots, *starts;
  int64_t count;

  Sequences(const Tensor& slot_numbers, const Tensor& first_tokens, int64_t num_slots, int64_t num_tokens)
      : slots(slot_numbers.const_data_ptr<int64_t>()), starts(first_tokens.const_data_ptr<int64_t>()),
        count(slot_numbers.numel()) {
    TWOSTEP_CHECK(slot_numbers.is_contiguous() && first_tokens.is_contiguous() && first_tokens.numel() == count + 1,
                  "sequences have a slot each, and starts");
    TWOSTEP_CHECK(std::all_of(slots, slots + count, [&](int64_t each) { return 0 <= each && each < num_slots; }),
                  "a slot is out of range");
    TWOSTEP_CHECK(starts[0] == 0 && starts[count] == num_tokens && std::is_sorted(starts, starts + count + 1),
                  "sequences follow one another");
  }
};

}  // namespace twostep::recurrent
