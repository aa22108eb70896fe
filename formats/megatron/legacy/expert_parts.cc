// SPDX-License-Identifier: Apache-2.0

#include "formats/megatron/legacy/expert_parts.h"

#include <utility>

#include "core/base/checked_math.h"
#include "core/base/strings.h"

namespace ckptfs::megatron {
namespace {

// A rank's rows and columns of one expert, and how they lie in its tensor.
struct Expert {
  uint64_t rows = 0;
  uint64_t columns = 0;
  uint64_t row_stride = 0;
  uint64_t column_stride = 1;
};

struct Ranks {
  uint64_t rank = 0;
  uint64_t count = 1;
  bool halves = false;   // rows are cut in two halves
  bool columns = false;  // columns are cut, not rows
};

void AddPiece(const Expert& expert, uint64_t number, uint64_t offset, uint64_t row, uint64_t rows,
              uint64_t to_row, uint64_t to_column, LocalTensor& local) {
  local.pieces.push_back({{1, rows, expert.columns},
                          {number, to_row, to_column},
                          offset + row * expert.row_stride,
                          {expert.rows * expert.columns, expert.row_stride, expert.column_stride},
                          1.0});
}

// Adds what a rank has of one expert, whose first element is at `offset` of its tensor.
Status AddExpert(const Expert& expert, const Ranks& ranks, uint64_t number, uint64_t offset,
                 LocalTensor& local) {
  if (ranks.columns) {
    AddPiece(expert, number, offset, 0, expert.rows, 0, ranks.rank * expert.columns, local);
    return {};
  }
  if (!ranks.halves) {
    AddPiece(expert, number, offset, 0, expert.rows, ranks.rank * expert.rows, 0, local);
    return {};
  }
  if (expert.rows % 2 != 0) return Refuse(expert.rows, " rows are not a gate and an up of as many");
  const uint64_t half = expert.rows / 2;
  for (uint64_t part = 0; part < 2; ++part) {
    AddPiece(expert, number, offset, part * half, half, (part * ranks.count + ranks.rank) * half, 0,
             local);
  }
  return {};
}

// Biases do not have columns.
void DropColumns(ExpertPart& part) {
  part.whole.pop_back();
  for (Piece& piece : part.local.pieces) {
    piece.shape.pop_back();
    piece.atom_begin.pop_back();
    piece.local_strides.pop_back();
  }
}

}  // namespace

Result<ExpertPart> ExpertPartOf(const ExpertCut& cut, const LocalName& name, const RankPlace& place,
                                const Shape& shape) {
  const bool grouped = name.form == LocalName::Form::kGrouped;
  if (shape.size() != (name.bias ? 1u : 2u)) {
    return Refuse("the shape ", ShapeToString(shape), " is not one of an expert's tensor");
  }
  Expert expert{shape[0], name.bias ? 1 : shape[1], name.bias ? 1 : shape[1], 1};
  if (grouped) {
    const uint64_t across = name.second ? shape[0] : shape[1];  // of all experts
    if (across % cut.local != 0) {
      return Refuse("the shape ", ShapeToString(shape), " is not one of ", cut.local, " experts");
    }
    expert = name.second ? Expert{shape[1], across / cut.local, 1, shape[1]}
                         : Expert{across / cut.local, shape[0], 1, across / cut.local};
  }
  ExpertPart out;
  out.replicated = name.bias && name.second;
  const Ranks ranks{out.replicated ? 0u : place.etp, out.replicated ? 1u : cut.etp,
                    cut.gated && !name.second && cut.etp > 1, name.second && !name.bias};
  out.first = place.ep * cut.local + (grouped ? 0 : name.expert);
  out.local.shape = shape;
  CKPT_ASSIGN_OR_RETURN(const uint64_t elements, ElementCount(shape));
  for (uint32_t e = 0; e < (grouped ? cut.local : 1); ++e) {
    CKPT_RETURN_IF_ERROR(AddExpert(expert, ranks, out.first + e,
                                   elements / cut.local * (grouped ? e : 0), out.local));
  }
  CKPT_ASSIGN_OR_RETURN(const uint64_t rows,
                        CheckedMul(expert.rows, ranks.columns ? 1 : ranks.count, "rows"));
  CKPT_ASSIGN_OR_RETURN(const uint64_t columns,
                        CheckedMul(expert.columns, ranks.columns ? ranks.count : 1, "columns"));
  out.whole = {cut.all, rows, columns};
  if (name.bias) DropColumns(out);
  CKPT_RETURN_IF_ERROR(ElementCount(out.whole));
  return out;
}

}  // namespace ckptfs::megatron
