// SPDX-License-Identifier: Apache-2.0
//
// UniversalReader: the shapes of its parameters.

#include <algorithm>

#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "formats/deepspeed/universal_reader.h"

namespace ckptfs::deepspeed {
namespace {

// A parameter of this shape on one rank can be `whole`: cut along one dim over
// at most `ranks`, or, of a vocabulary, padded.
bool CanBeOf(const Shape& local, const Shape& whole, uint64_t ranks, bool vocabulary) {
  if (local.size() != whole.size()) return false;
  size_t others = 0;
  for (size_t d = 0; d < local.size(); ++d) {
    if (local[d] == whole[d]) continue;
    ++others;
    const bool cut = whole[d] > local[d] && CeilDiv(whole[d], ranks) <= local[d];
    if (!cut && !(vocabulary && whole[d] < local[d])) return false;
  }
  return others < 2;
}

}  // namespace

// param_shapes (of each rank's part) against what the folders hold.
Status UniversalReader::CheckShapes() const {
  std::map<std::string_view, const Folder*> folders;
  for (const Folder& folder : folders_) folders.emplace(folder.name, &folder);
  for (const auto& [mp, model] : models_) {
    const uint64_t ranks =
        std::max<uint64_t>(1, model.tp_degree > 0 ? model.tp_degree : model.mp_world);
    for (const auto& group : model.groups) {
      for (const NamedShape& entry : group) {
        const auto found = folders.find(entry.name);
        if (found == folders.end()) continue;  // AddGroups refuses it
        const Folder& folder = *found->second;
        const Marks& marks = folder.states.front().marks;
        if (marks.experts > 0 || CanBeOf(entry.shape, folder.shape, ranks, marks.vocabulary))
          continue;
        return Fail(ErrorCode::kInvalid,
                    StrCat(PathOf(StrCat("zero/", folder.name)), "/fp32.pt: shape ",
                           ShapeToString(folder.shape), ", but ", model.file, " says ",
                           ShapeToString(entry.shape), " of each rank's part"));
      }
    }
  }
  return {};
}

// Stage 3 wrote flat tensors: param_shapes has the shapes.
Status UniversalReader::GiveShapes() {
  std::map<std::string, Shape> shapes;
  const ModelStates& model = models_.at(0);
  for (const auto& group : model.groups) {
    for (const NamedShape& entry : group) shapes.emplace(entry.name, entry.shape);
  }
  for (Folder& folder : folders_) {
    const auto master = std::find_if(folder.states.begin(), folder.states.end(),
                                     [](const State& state) { return state.kind == "master"; });
    if (master == folder.states.end()) {
      return Fail(ErrorCode::kInvalid,
                  StrCat(PathOf(StrCat("zero/", folder.name)), ": no fp32.pt"));
    }
    folder.shape = master->tensor->shape();
    const auto known = shapes.find(folder.name);
    if (!master->bare) continue;
    if (known == shapes.end()) {
      return Fail(ErrorCode::kInvalid,
                  StrCat(PathOf(StrCat("zero/", folder.name)), "/fp32.pt: a flat tensor, and ",
                         model.file, " has no param_shapes that would tell its shape"));
    }
    CKPT_ASSIGN_OR_RETURN(const uint64_t elements, ElementCount(known->second));
    if (elements != master->tensor->elements()) {
      return Fail(ErrorCode::kInvalid, StrCat(PathOf(StrCat("zero/", folder.name)), "/fp32.pt: ",
                                              master->tensor->elements(), " elements, but ",
                                              model.file, " says ", ShapeToString(known->second)));
    }
    folder.shape = known->second;
  }
  return {};
}

}  // namespace ckptfs::deepspeed
