// SPDX-License-Identifier: Apache-2.0
//
// Own puts a step's files into a store's own blob directory, so that the step
// survives a retention script that deletes its source, and makes the model of
// the step as it lies there, with the digests of all chunks.
//
//   <store>/blobs/<digest>/<tag>/...    the files, named as in the source
//   <store>/blobs/<digest>/...          those that lie beside the tag
//
// The digest is of the files' names and stamps: the same step is taken once.
// The directory gets its name when it is whole and durable.  Files and
// directories keep owner and mode, those with an ACL their owner's bits of it.
//
// Thread safety: may be called concurrently, also by several processes.
// Units: bytes.

#pragma once

#include <memory>
#include <string>

#include "core/base/result.h"
#include "core/model/step_model.h"

namespace ckptfs {

enum class Ownership {
  kReference,  // the files stay where they are
  kLink,       // reflinks, or hard links (they show changes, but survive deletion)
  kCopy,       // reflinks, or copies
};

struct OwnedStep {
  StepModel model;
  // Nobody takes the files for ones that no step needs while it lives: until the step is
  // published.
  std::shared_ptr<const void> hold;
};

// Success if files of the directory (or of its parent, while it is not there yet) can be linked
// into the store.  kUnsupported if they lie on another filesystem or mount without reflinks to
// it.  The owners of the files are not checked.
Status CheckLinks(const std::string& store, const std::string& directory);

// The step of the store's files.  `model` was read from the step directory (or file) `directory`
// (absolute); its files lie in it or beside it.  kStale if a file changed meanwhile; kUnsupported
// if it cannot be linked (another filesystem).  Copies are owned; a hard link is not: it keeps its
// stamp but for the change time, which is not its own (deleting the source changes it). REQUIRES:
// `ownership` is not kReference. BLOCKS: on copying.
Result<OwnedStep> Own(const std::string& store, const std::string& directory, StepModel model,
                      Ownership ownership);

}  // namespace ckptfs
