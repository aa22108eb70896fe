// SPDX-License-Identifier: Apache-2.0
//
// Catalogue remembers the texts of records in a SQLite file beside the store,
// so that opening a store of many steps need not read thousands of small
// files.  It is only ever a cache: which records exist is asked of the Storage
// every time, records never change, and a catalogue that is absent, damaged,
// of another store, another user's, writable by others or not writable is as good
// as an empty one.  Its mode is 0600.
//
// Thread safety: the functions may be called concurrently, also by several
// processes; each opens its own connection.
// BLOCKS: on the local disk.

#pragma once

#include <map>
#include <string>

namespace ckptfs {

using RecordTexts = std::map<std::string, std::string>;  // record name -> text

// Everything the catalogue at `path` knows of the store `store_id`.
RecordTexts LoadCatalogue(const std::string& path, const std::string& store_id);

// It is gone, with what it takes on the disk; the next one is made anew.
void DropCatalogue(const std::string& path);

// Adds records; a file of another store or a damaged one is made anew.
void AddToCatalogue(const std::string& path, const std::string& store_id,
                    const RecordTexts& records);

}  // namespace ckptfs
