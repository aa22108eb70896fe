// SPDX-License-Identifier: Apache-2.0

#include "core/adopt/publish.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/base/strings.h"
#include "core/check/weight_check.h"
#include "core/io/file_root.h"
#include "core/model/read_blobs.h"

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
  model =
      WithSideBlob(std::move(model), std::move(side->blob), std::move(side->root), packing.atoms);
  outcome.packed_atoms = packing.atoms.size();
  outcome.packed_pieces = packing.pieces;
  return std::move(side->hold);
}

// True if a step that is the same in all that is read of it is the same in all else, too.
bool HasOtherNotes(Store& store, const StepRecord& published, const RenderedStep& rendered) {
  if (published.manifest == rendered.manifest) return false;
  if (published.compacted) return false;  // its own files have all that the source had
  const auto there = store.Load(published);
  if (!there) return true;
  const auto whole = store.Render(WithoutSideBlob((*there)->model), rendered.unpacked);
  return !whole || whole->manifest != rendered.manifest;
}

// Sizes and fingerprints of the files that something is read of, in order.
std::vector<std::pair<uint64_t, Digest>> BytesOf(const StepModel& model) {
  const std::vector<uint8_t> read = FindReadBlobs(model);
  std::vector<std::pair<uint64_t, Digest>> bytes;
  for (size_t i = 0; i < model.blobs.size(); ++i) {
    const Blob& blob = model.blobs[i];
    if (read[i] != 0 && !blob.side) bytes.emplace_back(blob.stamp.size, blob.fingerprint);
  }
  std::sort(bytes.begin(), bytes.end());
  return bytes;
}

// REQUIRES: an absolute path.
bool IsThere(const std::string& path) {
  const auto found = FileRoot("/").Stat(path.substr(1));
  return found ||
         found.error().code != ErrorCode::kNotFound;  // one that cannot be looked at may be
}

// Where an adopted step was, seen from the save `model`, which is at `source`.
SourceNow LookAt(Store& store, const StepRecord& step, const StepModel& model,
                 const std::string& source) {
  if (step.source == source) {
    const auto there = store.Load(step);
    if (!there) return SourceNow::kThere;
    return BytesOf((*there)->model) == BytesOf(model) ? SourceNow::kSame : SourceNow::kRewritten;
  }
  const bool here = step.source.starts_with('/') && step.root.starts_with('/');
  const bool gone = here && !IsThere(step.source) && IsThere(step.root);
  return gone ? SourceNow::kGone : SourceNow::kThere;
}

Result<LifeChoice> ChooseLife(Store& store, const StepModel& model, const PublishRequest& request) {
  const auto steps = store.Steps(request.run);
  if (!steps && steps.error().code == ErrorCode::kNotFound) return LifeChoice();
  if (!steps) return Fail(Error(steps.error()));
  NewSave save;
  save.record.run = request.run;
  save.record.id = model.id;
  save.record.iteration = model.iteration;
  save.record.mtime_ns = model.mtime_ns;
  save.record.converted = request.how.converted;
  save.record.source = request.source;
  save.record.root = request.root;
  save.named = request.named;
  save.arrived = request.arrived;
  save.version = request.version;
  save.oldest_ns = request.oldest_ns;
  return LifeOf(*steps, save,
                [&](const StepRecord& step) { return LookAt(store, step, model, request.source); });
}

}  // namespace

Result<PublishOutcome> PublishStep(Store& store, StepModel model, const PublishRequest& request) {
  PublishOutcome outcome;
  std::shared_ptr<const void> hold;  // until the step needs the side blob
  CKPT_ASSIGN_OR_RETURN(RenderedStep rendered, store.Render(model));
  BlobReader::Options reading;
  reading.open_roots = request.open_roots;
  PublishHow how = request.how;
  CKPT_ASSIGN_OR_RETURN(auto published, store.FindPublished(request.run, model.id, rendered));
  how.notes = how.notes && published && HasOtherNotes(store, *published, rendered);
  if (published) how.life = published->life;
  if (how.notes) published.reset();
  if (!published && !how.notes) {
    CKPT_ASSIGN_OR_RETURN(outcome.life, ChooseLife(store, model, request));
    how.life = outcome.life.life;
  }
  if (request.pack || request.check) {
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
