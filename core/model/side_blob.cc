// SPDX-License-Identifier: Apache-2.0

#include "core/model/side_blob.h"

#include <algorithm>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

// Some fragment of the gather lies in the blob.
bool Touches(const Gather& gather, uint32_t blob) {
  return std::any_of(gather.series.begin(), gather.series.end(), [&](const FragmentSeries& s) {
    const auto last = static_cast<uint32_t>(s.At(s.count - 1).blob);
    return blob >= std::min(s.blob, last) && blob <= std::max(s.blob, last);
  });
}

Status CheckAtom(const Atom& atom, uint32_t blob) {
  const auto& gathers = atom.source.gathers;
  for (size_t i = 0; i < gathers.size(); ++i) {
    if (!Touches(gathers[i], blob)) continue;
    const bool first_of_copies = i == 0 && EqualCopies(atom.source).size() > 1;
    if (!first_of_copies) {
      return Fail(ErrorCode::kInvalid, "only the first of several replicas may be a side blob");
    }
  }
  return {};
}

}  // namespace

std::optional<BlobIndex> FindSideBlob(const StepModel& model) {
  if (model.blobs.empty() || !model.blobs.back().side) return std::nullopt;
  return BlobIndex{static_cast<uint32_t>(model.blobs.size() - 1)};
}

bool IsPacked(const StepModel& model, const Atom& atom) {
  const auto blob = FindSideBlob(model);
  const auto copies = EqualCopies(atom.source);
  return blob && !copies.empty() && Touches(copies.front(), static_cast<uint32_t>(*blob));
}

StepModel WithSideBlob(StepModel model, Blob blob, std::string root,
                       std::span<const SideAtom> atoms) {
  CKPT_CHECK(!FindSideBlob(model));
  blob.root = static_cast<uint32_t>(model.roots.size());
  blob.side = true;
  blob.store_owned = true;
  const auto index = static_cast<uint32_t>(model.blobs.size());
  model.roots.push_back(std::move(root));
  model.blobs.push_back(std::move(blob));
  for (const SideAtom& side : atoms) {
    Atom& atom = model.atoms[static_cast<uint32_t>(side.atom)];
    FragmentSeries series;
    series.elements = ElementCount(atom.shape).value_or(0);
    series.flat_step = series.elements;
    series.blob = index;
    series.offset = side.offset;
    series.dtype = atom.dtype;
    PutCopyFirst(atom.source, Gather{{WholeTensor(atom.shape)}, {series}});
  }
  return model;
}

StepModel WithoutSideBlob(StepModel model) {
  const auto blob = FindSideBlob(model);
  if (!blob) return model;
  for (Atom& atom : model.atoms) {
    if (IsPacked(model, atom)) TakeFirstCopy(atom.source);
  }
  model.roots.pop_back();
  model.blobs.pop_back();
  return model;
}

Status CheckSideBlob(const StepModel& model) {
  for (size_t i = 0; i + 1 < model.blobs.size(); ++i) {
    if (model.blobs[i].side) return Fail(ErrorCode::kInvalid, "a side blob must be the last blob");
  }
  const auto blob = FindSideBlob(model);
  if (!blob) return {};
  const auto index = static_cast<uint32_t>(*blob);
  if (model.blobs[index].root + 1 != model.roots.size() || !model.blobs[index].store_owned) {
    return Fail(ErrorCode::kInvalid, "a side blob must be the store's, in a last root of its own");
  }
  for (uint32_t i = 0; i < index; ++i) {
    if (model.blobs[i].root == model.blobs[index].root) {
      return Fail(ErrorCode::kInvalid, "a side blob must not share its root");
    }
  }
  for (size_t i = 0; i < model.atoms.size(); ++i) {
    if (Status valid = CheckAtom(model.atoms[i], index); !valid) {
      return Fail(std::move(valid).error().WithContext(StrCat("atom ", i)));
    }
  }
  for (const Document& document : model.documents) {
    for (const StoredTensor& tensor : document.tensors) {
      if (!tensor.atom && tensor.blob == *blob)
        return Fail(ErrorCode::kInvalid,
                    "a document lies "
                    "in a side blob");
    }
  }
  return {};
}

}  // namespace ckptfs
