"""What the appliance and the engine say to each other: frozen structs and a frame format. Free of torch."""
