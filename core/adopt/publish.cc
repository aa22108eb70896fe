// SPDX-License-Identifier: Apache-2.0

#include "core/adopt/publish.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/base/strings.h"
#include "core/jobs/weight_check.h"

namespace ckptfs {
namespace {

// Packs the model's small pieces, if it has any, into a side blob that the
// result holds; null if there is none.
Result<std::shared_ptr<const void>> Pack(Store& store, StepModel& model, BlobReader& blobs,
                                         const PackOptions& options, PublishOutcome& outcome) {
  CKPT_ASSIGN_OR_RETURN(Packing packing, PackSmallPieces(model, blobs, options));
  if (packing.atoms.empty()) return nullptr;
  Result<SideBlob> side = store.PutSideBlob(packing.bytes);
  if (!side && side.error().code == ErrorCode::kExhausted) {
    outcome.warning = StrCat("small pieces are not packed: ", side.error().message);
    return nullptr;
  }
  if (!side) return Fail(std::move(side).error().WithContext("side blob"));
  side->blob.mode = packing.access.mode;
  side->blob.uid = packing.access.uid;
  side->blob.gid = packing.access.gid;
  model = WithSideBlob(std::move(model), std::move(side->blob), std::move(side->root), packing.atoms);
  outcome.packed_atoms = packing.atoms.size();
  outcome.packed_pieces = packing.pieces;
  return std::move(side->hold);
}

// Whether a step that is the same as far as anything is read of it is so in all else, too.
bool HasOtherNotes(Store& store, const StepRecord& published, const RenderedStep& rendered) {
  if (published.manifest == rendered.manifest) return false;
  const auto there = store.Load(published);
  if (!there) return true;
  const auto whole = store.Render(WithoutSideBlob((*there)->model), rendered.unpacked);
  return !whole || whole->manifest != rendered.manifest;
}

}  // namespace

Result<PublishOutcome> PublishStep(Store& store, StepModel model, const PublishRequest& request) {
  PublishOutcome outcome;
  std::shared_ptr<const void> hold;  // until the step needs the side blob
  CKPT_ASSIGN_OR_RETURN(RenderedStep rendered, store.Render(model));
  BlobReader::Options reading;
  reading.open_roots = request.open_roots;
  PublishHow how = request.how;
  if (request.pack || request.check || how.notes) {
    CKPT_ASSIGN_OR_RETURN(auto published, store.FindPublished(request.run, model.id, rendered));
    how.notes = how.notes && published && HasOtherNotes(store, *published, rendered);
    if (how.notes) published.reset();
    const auto blobs = BlobReader::Create(model, std::move(reading));
    if (request.check && !published) CKPT_RETURN_IF_ERROR(CheckWeightSample(model, *blobs));
    if (request.pack && !published) {
      CKPT_ASSIGN_OR_RETURN(hold, Pack(store, model, *blobs, request.packing, outcome));
    }
    if (FindSideBlob(model)) {
      std::string().swap(rendered.bytes);  // of a step in a million pieces 200 MB
      CKPT_ASSIGN_OR_RETURN(rendered, store.Render(model, rendered.unpacked));
    }
  }
  std::vector<Atom>().swap(model.atoms);  // they are in the manifest, which is read once more
  CKPT_ASSIGN_OR_RETURN(outcome.record, store.Publish(request.run, model, rendered, request.source,
                                                      request.root, how));
  return outcome;
}

}  // namespace ckptfs
